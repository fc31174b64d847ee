"""The openai package against a server: python openai_client.py BASE_URL

Shapes are checked with any model that has parsers and grammars; the embedded model's answers, too.
"""

import base64
import json
import pathlib
import struct
import sys
import zlib

import openai

base = sys.argv[1].rstrip("/")
client = openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
embedded = model == "embedded"
sum_text = "What is 423 minus 269?"
weather_text = "Tell me the weather in Ankara."
question = [{"role": "user", "content": sum_text}]
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
schema = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
limit = 192
vision = pathlib.Path(__file__).resolve().parents[2] / "data/eval/vision.jsonl"


def png(colour, side=56):
    rows = b"".join(b"\0" + bytes(colour) * side for _ in range(side))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat():
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=limit, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length"), answer
    assert choice.message.content or choice.message.reasoning, answer
    assert choice.message.reasoning == choice.message.reasoning_content
    assert not embedded or (choice.message.reasoning and "154" in choice.message.content), answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return choice.message


def streaming():
    whole = chat()
    stream = client.chat.completions.create(
        model=model, messages=question, max_tokens=limit, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )
    content, reasoning, usage, finish = "", "", None, None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
    assert (content, reasoning) == (whole.content or "", whole.reasoning or ""), (content, reasoning, whole)
    assert usage and finish
    with client.chat.completions.stream(model=model, messages=question, max_tokens=limit, temperature=0) as helper:
        final = helper.get_final_completion()
    assert (final.choices[0].message.content or "") == content


def tool_loop():
    messages = [{"role": "user", "content": weather_text}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=limit, temperature=0
    ).choices[0]
    assert first.finish_reason in ("tool_calls", "length"), first
    calls = first.message.tool_calls or []
    assert calls or first.finish_reason == "length", first
    for call in calls:
        assert call.type == "function" and call.id and call.function.name == "get_weather"
        json.loads(call.function.arguments)
    stream = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="required", max_tokens=limit, temperature=0, stream=True
    )
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
        messages += [{"role": "tool", "tool_call_id": c.id, "content": '{"temperature": 22, "condition": "sunny"}'} for c in calls]
        last = client.chat.completions.create(
            model=model, messages=messages, tools=tools, max_tokens=limit, temperature=0
        ).choices[0]
        assert last.finish_reason in ("stop", "length", "tool_calls")
        assert not embedded or "22 degrees" in last.message.content, last
    assert not embedded or json.loads(calls[0].function.arguments) == {"city": "Ankara"}, calls
    if embedded:
        free = client.chat.completions.create(
            model=model, messages=messages[:1], tools=tools, max_tokens=limit, temperature=0
        ).choices[0]
        assert free.finish_reason == "tool_calls" and free.message.tool_calls[0].function.name == "get_weather", free


def shapes():
    answer = client.chat.completions.create(
        model=model, messages=question, max_tokens=limit, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}},
    ).choices[0]
    assert not embedded or answer.finish_reason == "stop", answer
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content)["answer"], int), answer
    helper = client.chat.completions.parse(
        model=model, messages=question, max_tokens=limit, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}},
    )
    assert helper.choices[0].message.content == answer.message.content


def images():
    parts = [
        {"type": "text", "text": "Which colour is it?"},
        {"type": "image_url", "image_url": {"url": png((255, 0, 0))}},
    ]
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": parts}], max_tokens=limit, temperature=0
    )
    assert answer.usage.prompt_tokens > 16
    if embedded:
        item = json.loads(open(vision).readline())
        seen = client.chat.completions.create(model=model, messages=item["messages"], max_tokens=limit, temperature=0)
        assert item["answer"] in seen.choices[0].message.content, seen
    try:
        parts[1]["image_url"]["url"] = "https://example.com/a.png"
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": parts}])
    except openai.BadRequestError as error:
        assert "data:" in str(error), error
    else:
        raise AssertionError("an https image was taken")


def responses():
    answer = client.responses.create(model=model, input=sum_text, max_output_tokens=limit, temperature=0)
    assert not embedded or "154" in answer.output_text, answer
    assert answer.status in ("completed", "incomplete") and answer.output, answer
    text = ""
    last = None
    for event in client.responses.create(
        model=model, input=sum_text, max_output_tokens=limit, temperature=0, stream=True
    ):
        last = event
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == answer.output_text, (text, answer.output_text)
    assert last.type in ("response.completed", "response.incomplete")
    called = client.responses.create(
        model=model, input=weather_text, max_output_tokens=limit, temperature=0, tool_choice="required",
        tools=[{"type": "function", **tools[0]["function"], "strict": False}],
    )
    for item in called.output:
        if item.type == "function_call" and called.status == "completed":
            json.loads(item.arguments)


def completions_and_errors():
    answer = client.completions.create(model=model, prompt="2+2=", max_tokens=4, temperature=0, logprobs=2)
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    for call, kind in [
        (lambda: client.chat.completions.create(model="nothing", messages=question), openai.NotFoundError),
        (lambda: client.chat.completions.create(model=model, messages=[]), openai.BadRequestError),
        (lambda: client.chat.completions.create(model=model, messages=question, temperature=9), openai.BadRequestError),
    ]:
        try:
            call()
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(kind)


for test in (chat, streaming, tool_loop, shapes, images, responses, completions_and_errors):
    test()
    print("openai", openai.__version__, test.__name__, "ok")
