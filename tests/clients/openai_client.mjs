// The openai npm package against a server: node openai_client.mjs BASE_URL API_KEY PICTURES
// PICTURES is a task file whose first line asks about a picture.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const [base, apiKey, pictures] = process.argv.slice(2);
const settings = { baseURL: `${base.replace(/\/$/, "")}/v1`, maxRetries: 0, timeout: 60_000 };
const client = new OpenAI({ ...settings, apiKey });
const model = (await client.models.list()).data[0].id;
const embedded = model === "embedded";
const messages = [{ role: "user", content: "What is 423 minus 269?" }];
const greedy = { model, max_tokens: 192, temperature: 0 };
const weather = '{"temperature": 22, "condition": "sunny"}';
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const ask = [{ role: "user", content: "Tell me the weather in Ankara." }];
const passed = (what) => console.log("npm openai", VERSION, what, "ok");

const whole = await client.chat.completions.create({ ...greedy, messages });
const message = whole.choices[0].message;
assert.equal(message.reasoning, message.reasoning_content);
if (embedded) assert.match(message.content, /154/);
passed("chat");

let content = "";
let finish = null;
let usage = null;
const options = { ...greedy, messages, stream: true, stream_options: { include_usage: true } };
for await (const event of await client.chat.completions.create(options)) {
  content += event.choices[0]?.delta.content ?? "";
  finish = event.choices[0]?.finish_reason ?? finish;
  usage = event.usage ?? usage;
}
assert.equal(content, message.content ?? "");
assert.ok(finish);
assert.deepEqual(usage.total_tokens, whole.usage.total_tokens);
const final = await client.chat.completions.stream({ ...greedy, messages }).finalChatCompletion();
assert.equal(final.choices[0].message.content ?? "", content);
// Somebody who goes away in the middle disturbs nobody.
const left = await client.chat.completions.create({ ...greedy, messages, stream: true });
for await (const _event of left) break;
left.controller.abort();
passed("streaming");

const called = (await client.chat.completions.create({ ...greedy, messages: ask, tools, tool_choice: "required" })).choices[0];
if (called.finish_reason === "tool_calls") {
  for (const call of called.message.tool_calls) JSON.parse(call.function.arguments);
  const results = called.message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: weather }));
  const last = await client.chat.completions.create({ ...greedy, messages: [...ask, called.message, ...results], tools });
  if (embedded) assert.match(last.choices[0].message.content, /22 degrees/);
} else {
  assert.equal(called.finish_reason, "length");
}
if (embedded) {
  // The package's own loop: it calls the function and sends what it returned, until there is an answer.
  const cities = [];
  const lookup = { name: "get_weather", parameters, parse: JSON.parse, function: ({ city }) => (cities.push(city), weather) };
  for (const stream of [false, true]) {
    const loop = client.chat.completions.runTools({ ...greedy, stream, messages: ask, tools: [{ type: "function", function: lookup }] });
    assert.match(await loop.finalContent(), /22 degrees/);
  }
  assert.deepEqual(cities, ["Ankara", "Ankara"]);
}
passed("tools");

const schema = { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"], additionalProperties: false };
const response_format = { type: "json_schema", json_schema: { name: "sum", strict: true, schema } };
const shaped = (await client.chat.completions.create({ ...greedy, messages, response_format })).choices[0];
if (shaped.finish_reason === "stop") assert.ok(Number.isInteger(JSON.parse(shaped.message.content).answer));
else assert.ok(!embedded);
passed("json_schema");

const item = JSON.parse(readFileSync(pictures, "utf8").split("\n")[0]);
const seen = (await client.chat.completions.create({ ...greedy, messages: item.messages })).choices[0].message.content;
if (embedded) assert.ok(seen.includes(item.answer), seen);
passed("images");

const request = { model, input: messages[0].content, max_output_tokens: 192, temperature: 0 };
const response = await client.responses.create(request);
let text = "";
for await (const event of await client.responses.create({ ...request, stream: true })) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert.equal(text, response.output_text);
const helped = await client.responses.stream(request).finalResponse();
assert.equal(helped.output_text, text);
const offered = [{ type: "function", name: "get_weather", parameters, strict: false }];
const asked = await client.responses.create({ ...request, input: ask, tools: offered, tool_choice: "required" });
const calls = asked.output.filter((output) => output.type === "function_call");
if (asked.status === "completed") {
  const outputs = calls.map((call) => ({ type: "function_call_output", call_id: call.call_id, output: weather }));
  const end = await client.responses.create({ ...request, input: [...ask, ...asked.output, ...outputs], tools: offered });
  if (embedded) assert.match(end.output_text, /22 degrees/);
}
passed("responses");

const status = (code) => (error) => error.status === code && error.message.length > 0;
await assert.rejects(client.chat.completions.create({ ...greedy, model: "nothing", messages }), status(404));
await assert.rejects(client.chat.completions.create({ ...greedy, messages: [] }), status(400));
await assert.rejects(client.chat.completions.create({ ...greedy, messages, temperature: 9, stream: true }), status(400));
if (apiKey !== "none") {
  const stranger = new OpenAI({ ...settings, apiKey: "wrong" });
  await assert.rejects(stranger.chat.completions.create({ ...greedy, messages }), status(401));
}
passed("errors");
