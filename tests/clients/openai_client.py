"""The openai package against a server: python openai_client.py BASE_URL [API_KEY]

Shapes are checked with any model that has parsers and grammars; the embedded model's answers, too. Every response and event
is validated against the package's own types, which by themselves would let anything pass.
"""

import asyncio
import base64
import json
import pathlib
import struct
import sys
import zlib

import openai
import pydantic

base = sys.argv[1].rstrip("/")
settings = dict(base_url=base + "/v1", max_retries=0, timeout=60, _strict_response_validation=True)
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = openai.OpenAI(api_key=key, **settings)
model = client.models.list().data[0].id
embedded = model == "embedded"
sum_text = "What is 423 minus 269?"
weather_text = "Tell me the weather in Ankara."
weather = '{"temperature": 22, "condition": "sunny"}'
question = [{"role": "user", "content": sum_text}]
function = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
tools = [{"type": "function", "function": function}]
limit = 192
greedy = dict(model=model, max_tokens=limit, temperature=0)
vision = pathlib.Path(__file__).resolve().parents[2] / "data/eval/vision.jsonl"


class Sum(pydantic.BaseModel):
    """What a shaped answer holds."""

    answer: int


def png(colour, side=56):
    rows = b"".join(b"\0" + bytes(colour) * side for _ in range(side))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def refused(kind, call):
    """The error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def chat():
    answer = client.chat.completions.create(messages=question, logprobs=True, top_logprobs=2, **greedy)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length"), answer
    assert choice.message.content or choice.message.reasoning, answer
    assert choice.message.reasoning == choice.message.reasoning_content
    assert not embedded or (choice.message.reasoning and "154" in choice.message.content), answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in choice.logprobs.content), choice
    several = client.chat.completions.create(model=model, messages=question, max_tokens=8, n=3, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    stopped = client.chat.completions.create(messages=question, stop=["154"], **greedy).choices[0]
    assert "154" not in (stopped.message.content or "")
    return choice.message


def streaming():
    whole = chat()
    stream = client.chat.completions.create(messages=question, stream=True, stream_options={"include_usage": True}, **greedy)
    content, reasoning, usage, finish = "", "", None, None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
    assert (content, reasoning) == (whole.content or "", whole.reasoning or ""), (content, reasoning, whole)
    assert usage and finish
    with client.chat.completions.stream(messages=question, **greedy) as helper:
        final = helper.get_final_completion()
    assert (final.choices[0].message.content or "") == content
    # Somebody who goes away in the middle disturbs nobody.
    with client.chat.completions.create(messages=question, stream=True, **greedy) as left:
        next(iter(left))
    assert (chat().content or "") == content


def together():
    """Several at once get what one gets alone."""

    async def ask(asynchronous, number):
        return (await asynchronous.chat.completions.create(messages=[{"role": "user", "content": f"What is {number} plus 8?"}], **greedy)).choices[0].message.content

    async def all_of(numbers):
        async with openai.AsyncOpenAI(api_key=key, **settings) as asynchronous:
            return await asyncio.gather(*(ask(asynchronous, number) for number in numbers))

    numbers = range(20, 28)
    assert asyncio.run(all_of(numbers)) == [asyncio.run(all_of([number]))[0] for number in numbers]


def tool_loop():
    messages = [{"role": "user", "content": weather_text}]
    first = client.chat.completions.create(messages=messages, tools=tools, tool_choice="required", **greedy).choices[0]
    assert first.finish_reason in ("tool_calls", "length"), first
    calls = first.message.tool_calls or []
    assert calls or first.finish_reason == "length", first
    for call in calls:
        assert call.type == "function" and call.id and call.function.name == "get_weather"
        json.loads(call.function.arguments)
    stream = client.chat.completions.create(messages=messages, tools=tools, tool_choice="required", stream=True, **greedy)
    streamed = {}
    for event in stream:
        for choice in event.choices:
            for part in choice.delta.tool_calls or []:
                entry = streamed.setdefault(part.index, {"name": "", "arguments": ""})
                entry["name"] += part.function.name or ""
                entry["arguments"] += part.function.arguments or ""
    assert [(e["name"], e["arguments"]) for e in streamed.values()] == [
        (c.function.name, c.function.arguments) for c in calls
    ], streamed
    if calls:
        messages.append(first.message.to_dict())
        messages += [{"role": "tool", "tool_call_id": c.id, "content": weather} for c in calls]
        last = client.chat.completions.create(messages=messages, tools=tools, **greedy).choices[0]
        assert last.finish_reason in ("stop", "length", "tool_calls")
        assert not embedded or "22 degrees" in last.message.content, last
        with client.chat.completions.stream(messages=messages, tools=tools, **greedy) as helper:
            again = helper.get_final_completion().choices[0].message
        assert again.content == last.message.content
    assert not embedded or json.loads(calls[0].function.arguments) == {"city": "Ankara"}, calls
    if embedded:
        free = client.chat.completions.parse(messages=messages[:1], tools=tools, **greedy).choices[0]
        assert free.finish_reason == "tool_calls", free
        assert free.message.tool_calls[0].function.parsed_arguments == {"city": "Ankara"}, free
        silent = client.chat.completions.create(messages=messages[:1], tools=tools, tool_choice="none", **greedy)
        assert not silent.choices[0].message.tool_calls and "<" not in (silent.choices[0].message.content or ""), silent


def shapes():
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}}
    answer = client.chat.completions.create(messages=question, response_format=response_format, **greedy).choices[0]
    assert not embedded or answer.finish_reason == "stop", answer
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content)["answer"], int), answer
        helper = client.chat.completions.parse(messages=question, response_format=Sum, **greedy).choices[0].message
        assert isinstance(helper.parsed, Sum) and helper.parsed.answer == json.loads(answer.message.content)["answer"]
        with client.chat.completions.stream(messages=question, response_format=Sum, **greedy) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == helper.parsed


def images():
    parts = [{"type": "text", "text": "Which colour is it?"}, {"type": "image_url", "image_url": {"url": png((255, 0, 0))}}]
    message = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(messages=message, **greedy)
    assert answer.usage.prompt_tokens > 16
    if embedded:
        item = json.loads(open(vision).readline())
        seen = client.chat.completions.create(messages=item["messages"], **greedy)
        assert item["answer"] in seen.choices[0].message.content, seen
    parts[1]["image_url"]["url"] = "https://example.com/a.png"
    error = refused(openai.BadRequestError, lambda: client.chat.completions.create(messages=message, **greedy))
    assert "data:" in str(error), error
    parts[1]["image_url"]["url"] = "data:image/png;base64,AAAA"
    refused(openai.BadRequestError, lambda: client.chat.completions.create(messages=message, **greedy))


def responses():
    options = dict(model=model, max_output_tokens=limit, temperature=0)
    answer = client.responses.create(input=sum_text, instructions="Be brief.", **options)
    assert not embedded or "154" in answer.output_text, answer
    assert answer.status in ("completed", "incomplete") and answer.output, answer
    with client.responses.stream(input=sum_text, instructions="Be brief.", **options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == answer.output_text
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    if answer.status == "completed":
        assert isinstance(client.responses.parse(input=sum_text, text_format=Sum, **options).output_parsed, Sum)
    offered = [{"type": "function", **function}]
    items = [{"role": "user", "content": weather_text}]
    called = client.responses.create(input=items, tools=offered, tool_choice="required", **options)
    calls = [item for item in called.output if item.type == "function_call"]
    if called.status == "completed":
        assert not embedded or [json.loads(call.arguments) for call in calls] == [{"city": "Ankara"}], called
        items += called.output
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": weather} for call in calls]
        with client.responses.stream(input=items, tools=offered, **options) as stream:
            last = stream.until_done().get_final_response()
        assert not embedded or "22 degrees" in last.output_text, last
    picture = [{"type": "input_text", "text": "Which colour is it?"}, {"type": "input_image", "image_url": png((0, 0, 255)), "detail": "auto"}]
    assert client.responses.create(input=[{"role": "user", "content": picture}], **options).usage.input_tokens > 16
    error = refused(openai.APIStatusError, lambda: client.responses.create(input="x", previous_response_id="resp_1", **options))
    assert error.status_code in (400, 404), error


def completions_and_errors():
    answer = client.completions.create(model=model, prompt="2+2=", max_tokens=4, temperature=0, logprobs=2)
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    # The package's type of these events has no place for a finish_reason that is not there yet.
    lenient = openai.OpenAI(api_key=key, **(settings | {"_strict_response_validation": False}))
    events = lenient.completions.create(model=model, prompt="2+2=", max_tokens=4, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in events) == answer.choices[0].text
    create = client.chat.completions.create
    for call, kind in [
        (lambda: create(model="nothing", messages=question), openai.NotFoundError),
        (lambda: create(model="nothing", messages=question, stream=True), openai.NotFoundError),
        (lambda: create(model=model, messages=[]), openai.BadRequestError),
        (lambda: create(model=model, messages=question, temperature=9), openai.BadRequestError),
        (lambda: create(model=model, messages=question, max_tokens=10**9), openai.BadRequestError),
    ]:
        error = refused(kind, call)
        assert error.body["message"] and error.body["code"] == error.status_code, error.body
    if key != "none":
        stranger = openai.OpenAI(api_key="wrong", **settings)
        refused(openai.AuthenticationError, lambda: stranger.chat.completions.create(messages=question, **greedy))


for test in (chat, streaming, together, tool_loop, shapes, images, responses, completions_and_errors):
    test()
    print("openai", openai.__version__, test.__name__, "ok")
