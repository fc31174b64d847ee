"""The anthropic package against a server: python anthropic_client.py BASE_URL"""

import json
import sys
import urllib.request

import anthropic

base = sys.argv[1].rstrip("/")
client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
model = json.load(urllib.request.urlopen(base + "/v1/models"))["data"][0]["id"]
embedded = model == "embedded"
question = [{"role": "user", "content": "What is 423 minus 269?"}]
tools = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
limit = 192


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def messages():
    answer = client.messages.create(model=model, max_tokens=limit, messages=question, system="Be brief.")
    assert answer.type == "message" and answer.role == "assistant"
    assert answer.stop_reason in ("end_turn", "max_tokens"), answer
    count = client.messages.count_tokens(model=model, messages=question, system="Be brief.")
    assert count.input_tokens == answer.usage.input_tokens


def streaming():
    seen = []
    with client.messages.stream(model=model, max_tokens=limit, messages=question, extra_body={"temperature": 0}) as stream:
        for event in stream:
            seen.append(event.type)
        final = stream.get_final_message()
    assert seen[0] == "message_start" and seen[-1] == "message_stop", seen
    whole = client.messages.create(model=model, max_tokens=limit, messages=question, extra_body={"temperature": 0})
    assert text(final) == text(whole)
    assert not embedded or "154" in text(final), final
    assert not embedded or "thinking" in seen, seen
    assert final.usage.output_tokens == whole.usage.output_tokens


def tool_loop():
    ask = [{"role": "user", "content": "Tell me the weather in Ankara."}]
    options = dict(model=model, max_tokens=limit, tools=tools, extra_body={"temperature": 0})
    first = client.messages.create(messages=ask, tool_choice={"type": "any"}, **options)
    uses = [block for block in first.content if block.type == "tool_use"]
    assert (first.stop_reason == "tool_use") == (bool(uses) and first.stop_reason != "max_tokens"), first
    with client.messages.stream(messages=ask, tool_choice={"type": "any"}, **options) as stream:
        streamed = stream.get_final_message()
    assert [b.input for b in streamed.content if b.type == "tool_use"] == [b.input for b in uses]
    if uses and first.stop_reason == "tool_use":
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": '{"temperature": 22, "condition": "sunny"}'} for block in uses]
        ask += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        last = client.messages.create(messages=ask, **options)
        assert last.stop_reason in ("end_turn", "max_tokens", "tool_use")
        assert not embedded or "22 degrees" in text(last), last
    assert not embedded or [block.input for block in uses] == [{"city": "Ankara"}], first


def thinking():
    answer = client.messages.create(
        model=model, max_tokens=2048, messages=question, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    blocks = [block for block in answer.content if block.type == "thinking"]
    assert blocks and blocks[0].signature, answer
    # The thoughts of an earlier turn come back as they went out.
    turns = question + [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "What is 2 plus 3?"}]
    again = client.messages.create(model=model, max_tokens=limit, messages=turns)
    assert again.stop_reason in ("end_turn", "max_tokens"), again


def errors():
    for call, kind in [
        (lambda: client.messages.create(model="nothing", max_tokens=5, messages=question), anthropic.NotFoundError),
        (lambda: client.messages.create(model=model, max_tokens=0, messages=question), anthropic.BadRequestError),
    ]:
        try:
            call()
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"]
        else:
            raise AssertionError(kind)


for test in (messages, streaming, tool_loop, thinking, errors):
    test()
    print("anthropic", anthropic.__version__, test.__name__, "ok")
