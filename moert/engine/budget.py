"""The memory budget: divides a limit between the files of a pack, the process, the requests and the expert cache."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moert.errors import BudgetTooSmall, InvalidMemory, SettingInvalid, said
from moert.machine import held_bytes, most_bytes
from moert.pack.manifest import BACKBONE, Manifest, Preference
from moert.pack.messages import NO_MEMORY, NotASize, parse_size
from moert.pack.model_spec import LayerKey, ModelSpec
from moert.pack.reader import Pack
from moert.pack.tensors import COVERED_BYTES, NOTHING, TEXT_BYTES, TOKENIZER, Room, Taken, bound_of, tokenizer_takes
from moert.stats import size

_SHARE = re.compile(r"([0-9]+|[0-9]*\.[0-9]+)\s*%")

_UNPACKED = 6  # bytes a weight, in float32 and on the way to that
FIRST_BYTES = 10 << 20
"""Memory that the first request takes for good, beside its own part: pages of libraries that have not run before, and
scratch that the kernels keep (6 to 9 MB measured on x86)."""
_MARGIN_BYTES = 14 << 20  # for what malloc and large pages keep (9 MB measured), and the kernel's own (2 MB)
_MARGIN_PART = 128  # and this part of the limit; page tables alone take a 512th
_STARTING_BYTES = 4 << 20  # libraries, threads and buffers that come with the weights (2 MB measured)
_SLACK_BYTES = 4 << 20  # between two starts of the same command
BARE_BYTES = 54_000_000
"""Memory that a process of moert is taken to hold before it opens a pack, if it holds no more: 41 to 49 MB on x86
(VmRSS of a program in Python, `moert run` and `moert info`), and _SLACK_BYTES, so that all three give the same
answer."""
_ENTRY_BYTES = 2 << 10  # kept for each expert: its entry in the manifest, and its place (1.8 kB measured)
_FREE_PART = 10  # of the free memory `auto` leaves a tenth to others


@dataclass(frozen=True)
class MemoryLimit:
    """The value of --memory: bytes for the whole process, or a share of the memory that it can have; with neither, the
    free memory but for a part that is left to others."""

    nbytes: int | None = None
    share: float | None = None

    def resolve(self, held_bytes: int, most_bytes: int | None) -> int | None:
        """Returns the limit [bytes] of a process that holds `held_bytes` and can have `most_bytes` in all, never more
        than these; None where neither the user nor the system names a number. Raises InvalidMemory for a share where
        the system names none."""
        if self.nbytes is not None:
            return self.nbytes if most_bytes is None else min(self.nbytes, most_bytes)
        if most_bytes is None:
            if self.share is None:
                return None
            raise InvalidMemory(
                f"the free memory of this system is unknown: give {said('memory')} as a size like 1.5GB"
            )
        if self.share is not None:
            return int(self.share * most_bytes)
        return most_bytes - max(0, most_bytes - held_bytes) // _FREE_PART

    def named(self, nbytes: int) -> str:
        """Returns the limit, resolved to `nbytes`, in words for messages."""
        if self.nbytes is not None and nbytes == self.nbytes:
            return f"a memory budget of {nbytes} bytes"
        asked = "what" if self.share is None else f"{100 * self.share:g}% of what"
        return f"{asked} this process can get ({size(nbytes)})"


AUTO_MEMORY = MemoryLimit()


@dataclass(frozen=True)
class CacheLimit:
    """The value of cache: bytes, or a share of the experts' bytes."""

    nbytes: int | None = None
    share: float | None = None

    def resolve(self, expert_bytes: int) -> int:
        return int((self.share or 0) * expert_bytes) if self.nbytes is None else self.nbytes


def parse_memory(text: str) -> MemoryLimit:
    """Returns the limit that a text stands for: '1.5GB', '800MB', '512MiB', '123456' (bytes), '50%' or 'auto'. Raises
    InvalidMemory."""
    if text.strip().lower() == "auto":
        return AUTO_MEMORY
    return MemoryLimit(*_parse(text, "memory", " or auto", NO_MEMORY))


def parse_cache(text: str) -> CacheLimit:
    """Returns the limit that a text such as '600MB' or '25%' stands for. Raises InvalidMemory."""
    return CacheLimit(*_parse(text, "cache", ""))


def _parse(text: str, name: str, more: str, *too_few: int) -> tuple[int | None, float | None]:
    """Returns bytes and None, or None and a share. Raises InvalidMemory."""
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        try:
            return parse_size(text, *too_few), None
        except NotASize as error:
            raise InvalidMemory(f"{said(name)} {error}, or a share like 50%{more}") from None
    share = float(f"{match[1]}e-2")
    if not 0 < share <= 1:
        raise InvalidMemory(f"{said(name)} {text!r} should be more than 0% and at most 100%")
    return None, share


@dataclass(frozen=True)
class Budget:
    """The memory that a pack needs, in bytes.

    backbone: everything but the experts. scratch: one expert unpacked, where weights are computed with in float32.
    layer: the most that one token can demand of one layer (its top_k largest experts). token: the sum of these over all
    layers of the decoder. experts: all of them. An expert counts with its whole file, since all of it is kept. thread:
    the stacks of threads. opened: data of the pack that is kept before its weights are loaded. `tokenizer`: the memory
    that reading the tokenizer takes.

    `filled`: the least part of its pages that an expert fills, less than 1 where pages are larger than the pack's.
    """

    backbone_bytes: int
    scratch_bytes: int
    layer_bytes: int
    token_bytes: int
    expert_bytes: int
    thread_bytes: int = 0
    opened_bytes: int = 0
    tokenizer: Taken = NOTHING
    filled: float = 1.0
    token_beside: str = ""
    """Words for the weights that a token needs beside `token_bytes`."""

    @classmethod
    def of(
        cls, manifest: Manifest, widened: bool = False, thread_bytes: int = 0, page_bytes: int = mmap.PAGESIZE,
        beside_bytes: int = 0,
    ) -> Budget:  # fmt: skip
        """Returns the budget of a pack. `widened`: weights are computed with in float32; otherwise they stay as they
        are stored. `thread_bytes`: of all threads. `page_bytes`: of this machine's memory. `beside_bytes`: data that is
        read before the backbone."""
        files: dict[LayerKey, list[int]] = {}
        for entry in manifest.experts:
            files.setdefault(entry.key.at, []).append(entry.file_bytes)
        stored_bytes = manifest.files[BACKBONE].nbytes if BACKBONE in manifest.files else 0
        found = cls.sized(manifest.model, stored_bytes, files, widened, thread_bytes, page_bytes)
        return replace(found, opened_bytes=found.opened_bytes + beside_bytes)

    @classmethod
    def sized(
        cls, spec: ModelSpec, stored_bytes: int, files: Mapping[LayerKey, Sequence[int]], widened: bool = False,
        thread_bytes: int = 0, page_bytes: int = mmap.PAGESIZE,
    ) -> Budget:  # fmt: skip
        """Returns the budget of a pack that need not exist: its backbone takes `stored_bytes`, and `files` has the
        bytes of each expert by layer."""
        demand = {at: sum(sorted(sizes)[-spec.moe.router.top_k :]) for at, sizes in files.items()}
        everything = [nbytes for sizes in files.values() for nbytes in sizes]
        widened_bytes = 4 * sum(math.prod(tensor.shape) for tensor in spec.tensors.values())
        return cls(
            backbone_bytes=widened_bytes if widened else stored_bytes,
            scratch_bytes=_UNPACKED * spec.weights_per_expert() if widened else 0,
            layer_bytes=max(demand.values(), default=0),
            token_bytes=sum(nbytes for at, nbytes in demand.items() if at.stack == "decoder"),
            expert_bytes=sum(everything),
            thread_bytes=thread_bytes,
            opened_bytes=_ENTRY_BYTES * len(everything),
            filled=min((nbytes / (page_bytes * -(-nbytes // page_bytes)) for nbytes in everything), default=1.0),
        )

    def held_as(self, token_bytes: int, all_bytes: int, beside: str = "") -> Budget:
        """Returns the same budget where experts are not held whole: a token needs room for `token_bytes` of its
        experts, and in words for `beside`; all experts take `all_bytes` in memory, if that is more than their files."""
        most = max(self.expert_bytes, all_bytes)
        return replace(self, token_bytes=token_bytes, token_beside=beside, expert_bytes=most)

    @property
    def loading_bytes(self) -> int:
        """Bytes that loading the weights adds to the process."""
        return self.backbone_bytes + _STARTING_BYTES

    @property
    def loaded_bytes(self) -> int:
        """Bytes that the process holds of an open pack whose tokenizer was read."""
        return self.opened_bytes + self.loading_bytes + self.tokenizer.kept_bytes

    def left_bytes(self, limit_bytes: int, held_bytes: int, coming_bytes: int) -> int:
        """Returns the bytes left for experts, negative if memory is too small: a process that holds `held_bytes`
        without experts will hold `coming_bytes` more."""
        margin = spare_bytes(limit_bytes) + self.scratch_bytes + self.thread_bytes
        left = limit_bytes - margin - held_bytes - coming_bytes
        return int(self.filled * left) if left > 0 else left

    def fitting_bytes(self, left_bytes: int) -> int:
        """Returns the size [bytes] of the expert cache where `left_bytes` are left: at least the largest demand of a
        layer, at most all experts."""
        return max(self.layer_bytes, min(left_bytes, self.expert_bytes))

    def smallest_bytes(self, held_bytes: int, coming_bytes: int) -> int:
        """Returns the smallest --memory [bytes, whole megabytes] for a process that holds `held_bytes` and will hold
        `coming_bytes` more; with a little slack, since no two starts are alike."""
        layer = math.ceil(self.layer_bytes / self.filled)
        lacking = -self.left_bytes(0, held_bytes, coming_bytes) + layer + _SLACK_BYTES
        return -(-lacking * _MARGIN_PART // (_MARGIN_PART - 1) // 10**6) * 10**6

    def smallest_memory(self, held_bytes: int, request_bytes: int, aside_bytes: int = 0) -> int:
        """Returns the smallest --memory [bytes, whole megabytes] of a request whose keys, values and activations take
        `request_bytes`: the one answer of `moert info`, of refusals and of Python. `held_bytes`: held by the process
        before it opens the pack; `aside_bytes`: taken by a chat template's process, which ends before the request
        begins."""
        held = max(held_bytes, BARE_BYTES - _SLACK_BYTES) + self.opened_bytes
        request = self.tokenizer.kept_bytes + FIRST_BYTES + request_bytes
        aside = self.tokenizer.kept_bytes + aside_bytes
        return self.smallest_bytes(held, self.loading_bytes + max(self.tokenizer.peak_bytes, request, aside))

    def fits(self, limit_bytes: int, held_bytes: int, request_bytes: int) -> bool:
        """Returns whether a request runs in this limit. It does in its smallest limit, of which a control group counts
        only whole pages, and in a little less, since that limit depends on the start."""
        return limit_bytes + mmap.PAGESIZE > self.smallest_memory(held_bytes - _SLACK_BYTES, request_bytes)

    def too_small(
        self, limit: str, held_bytes: int, request_bytes: int, who_needs: str, fewer_tokens: int = 0
    ) -> BudgetTooSmall:
        """Returns the error that says why a request does not run in this limit, and in which one it would. It could run
        with `fewer_tokens` new tokens, unless these are 0."""
        smallest, held = self.smallest_memory(held_bytes, request_bytes), max(held_bytes, BARE_BYTES)
        rest = smallest - held - self.loaded_bytes - request_bytes - self.layer_bytes
        tokenizer = f"{size(self.tokenizer.kept_bytes)} for the tokenizer, " if self.tokenizer.kept_bytes else ""
        return BudgetTooSmall(
            f"{limit} is too small: {who_needs} {said('memory', smallest)} ({size(smallest)}): "
            f"{size(held)} for the process without the pack, {size(self.opened_bytes + self.loading_bytes)} for all "
            f"weights but the experts, {tokenizer}{size(request_bytes)} for keys, values and "
            f"activations, {size(self.layer_bytes)} for one token's experts of a layer, {size(rest)} spare"
            + (f"; {said('max_new_tokens', fewer_tokens)} would fit" if fewer_tokens else ""),
            smallest,
        )

    def check_cache(self, cache_bytes: int) -> None:
        """Raises BudgetTooSmall for an expert cache that can't hold the largest demand of a layer."""
        if cache_bytes < self.layer_bytes:
            raise BudgetTooSmall(
                f"an expert cache of {cache_bytes} bytes is too small: give at least "
                f"{said('cache', self.layer_bytes)}, the experts that one token can need of a layer",
                self.layer_bytes,
            )


def spare_bytes(limit_bytes: int) -> int:
    """Returns the bytes of a limit that nobody is given: malloc, large pages and the kernel keep them."""
    return limit_bytes // _MARGIN_PART + _MARGIN_BYTES


AUTO_ROUTING, EXACT_ROUTING = "auto", "exact"


def check_routing(wanted: str, others: Sequence[str]) -> None:
    """Raises SettingInvalid for a name that can be the routing of no pack. `others`: names of routers in place of the
    model's own."""
    if wanted not in (AUTO_ROUTING, EXACT_ROUTING, *others):
        _share(wanted, others)


def preference_for(
    wanted: str, known: Sequence[Preference], share: float, others: Sequence[str] = ()
) -> Preference | None:
    """Returns the preference of cache-aware routing that `wanted` names: AUTO_ROUTING, EXACT_ROUTING, one of the
    `others`, or the share of the experts that a preference is made for ("25%"). None: the routers prefer nothing.

    AUTO_ROUTING takes the preference for the largest share that is no more than `share`, the part of the experts that
    has room, or the smallest one, and exact routing where all have room. Raises SettingInvalid for a share without a
    preference.
    """
    if wanted in (EXACT_ROUTING, *others) or (wanted == AUTO_ROUTING and (not known or share >= 1)):
        return None
    if wanted == AUTO_ROUTING:
        return next((one for one in reversed(known) if one.share <= share), known[0])
    asked = _share(wanted, others)
    for one in known:
        if abs(one.share - asked) < 1e-6:
            return one
    shares = ", ".join(share_text(one.share) for one in known) or "none (moeconv quantize --resident makes some)"
    raise SettingInvalid("routing", f"{wanted!r} is not in this pack: it has {EXACT_ROUTING}, and for shares {shares}")


def preference_note(preference: Preference) -> str:
    """Returns a note that tells users of the preference, of its loss, and how to turn it off."""
    loss = "" if preference.heldout is None else f", held-out loss {100 * preference.heldout.loss:.1f}%"
    return (
        f"routing prefers experts that were used lately, for room for {share_text(preference.share)} of them{loss}: "
        f"{said('routing', EXACT_ROUTING)} turns that off"
    )


def share_text(share: float) -> str:
    """Returns a share as text, such as 25%."""
    return f"{100 * share:g}%"


def _share(wanted: str, others: Sequence[str]) -> float:
    try:
        share = float(wanted.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not wanted.endswith("%") or not 0 < share < 1:
        names = ", ".join((AUTO_ROUTING, EXACT_ROUTING, *others))
        raise SettingInvalid("routing", f"{wanted!r} should be {names}, or a share of the experts such as 25%")
    return share


Limit = MemoryLimit | CacheLimit | None
_ANY = 1 << 40  # letters, where nobody knows how much memory there is
_PART = 1 << 20


def room_within(limit: Limit) -> Room:
    """Returns a function that raises BudgetTooSmall when it is called for more bytes than a process with this limit has
    left; where the limit bounds no process, the machine's memory does."""

    def room(nbytes: int, name: str) -> None:
        if nbytes <= COVERED_BYTES:
            return
        held = held_bytes()
        most, called = _most(limit, held)
        if most is None:
            return
        needed = held + nbytes + spare_bytes(most)
        if needed > most:
            smallest = -(-needed // 10**6) * 10**6
            raise BudgetTooSmall(
                f"{called} is too small to read {name} of the pack, which may take {size(nbytes)} beside "
                f"{size(held)} that the process holds: give at least {said('memory', smallest)} ({size(smallest)})",
                smallest,
            )

    return room


def budget_of(pack: Pack, widened: bool, thread_bytes: int, beside_bytes: int) -> Budget:
    """Returns the Budget of a pack, its tokenizer included; see Budget.of. Raises FileMissing or FileTruncated."""
    budget = Budget.of(pack.manifest, widened, thread_bytes, beside_bytes=beside_bytes)
    return replace(budget, tokenizer=_tokenizer(pack))


def _tokenizer(pack: Pack) -> Taken:
    """Returns the memory that reading the pack's tokenizer takes; NOTHING without one, or where it is too large to be
    read at all."""
    entry = pack.manifest.files.get(TOKENIZER)
    if entry is None or entry.nbytes > bound_of(TOKENIZER).most_bytes:
        return NOTHING
    with pack.opened(TOKENIZER) as file:
        starts = range(0, file.nbytes, _PART)
        return tokenizer_takes(file.read(min(_PART, file.nbytes - at), at) for at in starts)


def letters_within(limit: Limit) -> tuple[int, str]:
    """Returns the most letters of a text that memory has room to make tokens of, and the limit in words."""
    held = held_bytes()
    most, called = _most(limit, held)
    if most is None:
        return _ANY, called
    return max(COVERED_BYTES, most - held - spare_bytes(most)) // TEXT_BYTES, called


def _most(limit: Limit, held: int) -> tuple[int | None, str]:
    """Returns the most bytes that the process may come to hold, None if nobody knows, and the limit in words."""
    bounds, machine = limit if isinstance(limit, MemoryLimit) else AUTO_MEMORY, most_bytes()
    most = machine if bounds is AUTO_MEMORY else bounds.resolve(held, machine)
    return most, "" if most is None else bounds.named(most)
