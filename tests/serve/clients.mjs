// node clients.mjs ADDRESS openai|anthropic: what these libraries promise their users, on the server there.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [, , address, part] = process.argv;
const parameters = {
  type: "object",
  properties: { fine: { type: "boolean" } },
  required: ["fine"],
  additionalProperties: false,
};
const model = "tiny";
const messages = [{ role: "user", content: "hello" }];
const most = { max_tokens: 300 };

async function openai() {
  const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
  for await (const each of client.models.list()) assert.equal((await client.models.retrieve(each.id)).id, model);
  const whole = await client.chat.completions.create({ model, messages, ...most });
  const stream = client.chat.completions.stream({ model, messages, ...most, stream_options: { include_usage: true } });
  const streamed = await stream.finalChatCompletion();
  assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);
  assert.deepEqual(streamed.usage.completion_tokens, whole.usage.completion_tokens);

  const seen = [];
  const tool = { name: "weather", parameters, parse: JSON.parse, function: (found) => seen.push(found) && "sunny" };
  const runner = client.chat.completions.runTools({
    model, messages, ...most, stream: true, parallel_tool_calls: false, tools: [{ type: "function", function: tool }],
    tool_choice: { type: "function", function: { name: "weather" } },
  });
  await runner.done();
  assert.equal(typeof seen[0].fine, "boolean");
  assert.deepEqual(runner.messages.slice(1, 3).map((each) => each.role), ["assistant", "tool"]);

  const asked = { model, input: "hello", tools: [{ type: "function", name: "weather", parameters, strict: true }] };
  const choice = { tool_choice: { type: "function", name: "weather" }, parallel_tool_calls: false };
  const response = await client.responses.stream({ ...asked, ...choice }).finalResponse();
  assert.equal(response.status, "completed");
  assert.equal(typeof response.output[0].parsed_arguments.fine, "boolean");
  const cut = await client.chat.completions.create({ model, messages, max_tokens: 1e6, logit_bias: { 1: -100, 3: -100 }, stream: true });
  for await (const _ of cut) break; // leaves, and its answer ends
}

async function anthropic() {
  const client = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
  const tool = { name: "weather", description: "of a city", input_schema: parameters };
  const tool_choice = { type: "tool", name: "weather", disable_parallel_tool_use: true };
  const stream = client.messages.stream({ model, messages, ...most, tools: [tool], tool_choice });
  let text = "";
  stream.on("inputJson", (piece) => (text += piece));
  const found = await stream.finalMessage();
  assert.equal(found.stop_reason, "tool_use");
  assert.deepEqual(JSON.parse(text), found.content.at(-1).input);
  const format = { type: "json_schema", schema: parameters };
  const bound = await client.messages.create({ model, messages, ...most, output_config: { format } });
  assert.equal(typeof JSON.parse(bound.content[0].text).fine, "boolean");

  let runs = 0;
  const runner = client.beta.messages.toolRunner({
    model, messages, ...most, max_iterations: 2, tool_choice,
    tools: [{ ...tool, parse: (given) => given, run: async () => `sunny ${++runs}` }],
  });
  const last = await runner.runUntilDone();
  assert.equal(last.role, "assistant");
  assert.equal(runs, 2, "the second turn goes on without the thread that the server does not keep");
  await assert.rejects(client.messages.create({ model: "none", messages, ...most }), Anthropic.NotFoundError);
}

await { openai, anthropic }[part]();
console.log("done");
