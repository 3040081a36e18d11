// Sorts a table by the column whose head is pressed; a second press turns the order.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const order = head.ariaSort === "ascending" ? "descending" : "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    const key = (row) => {
      const text = row.cells[column].dataset.value ?? row.cells[column].textContent;
      return head.classList.contains("number") ? (text === "" ? -Infinity : Number(text)) : text;
    };
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0));
    if (order === "descending") rows.reverse();
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}
document.documentElement.dataset.ready = document.querySelectorAll("main > section").length;
