// The openai npm package against a server: node openai_client.mjs BASE_URL
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2].replace(/\/$/, "")}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "What is 423 minus 269?" }];
const base = { model, max_tokens: 192, temperature: 0 };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

const whole = await client.chat.completions.create({ ...base, messages });
const message = whole.choices[0].message;
assert.equal(message.reasoning, message.reasoning_content);
if (model === "embedded") assert.match(message.content, /154/);
console.log("npm openai chat ok");

let content = "";
let finish = null;
for await (const event of await client.chat.completions.create({ ...base, messages, stream: true })) {
  content += event.choices[0]?.delta.content ?? "";
  finish = event.choices[0]?.finish_reason ?? finish;
}
assert.equal(content, message.content ?? "");
assert.ok(finish);
const final = await client.chat.completions.stream({ ...base, messages }).finalChatCompletion();
assert.equal(final.choices[0].message.content ?? "", content);
console.log("npm openai stream ok");

const ask = [{ role: "user", content: "Tell me the weather in Ankara." }];
const called = (await client.chat.completions.create({ ...base, messages: ask, tools, tool_choice: "required" })).choices[0];
if (called.finish_reason === "tool_calls") {
  for (const call of called.message.tool_calls) JSON.parse(call.function.arguments);
  const results = called.message.tool_calls.map((c) => ({ role: "tool", tool_call_id: c.id, content: '{"temperature": 22, "condition": "sunny"}' }));
  await client.chat.completions.create({ ...base, messages: [...ask, called.message, ...results], tools });
} else {
  assert.equal(called.finish_reason, "length");
}
console.log("npm openai tools ok");

const schema = { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"] };
const response_format = { type: "json_schema", json_schema: { name: "sum", schema } };
const shaped = (await client.chat.completions.create({ ...base, messages, response_format })).choices[0];
if (shaped.finish_reason === "stop") assert.ok(Number.isInteger(JSON.parse(shaped.message.content).answer));
console.log("npm openai json_schema ok");

const response = await client.responses.create({ model, input: "What is 423 minus 269?", max_output_tokens: 192, temperature: 0 });
let text = "";
const stream = await client.responses.create({ model, input: "What is 423 minus 269?", max_output_tokens: 192, temperature: 0, stream: true });
for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
assert.equal(text, response.output_text);
console.log("npm openai responses ok");

await assert.rejects(client.chat.completions.create({ ...base, model: "nothing", messages }), (error) => error.status === 404);
console.log("npm openai errors ok");
