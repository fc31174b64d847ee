"""The anthropic package against a server: python anthropic_client.py BASE_URL [API_KEY]

Every response and event is validated against the package's own types.
"""

import json
import pathlib
import sys
import urllib.request

import anthropic

base = sys.argv[1].rstrip("/")
key = sys.argv[2] if len(sys.argv) > 2 else "none"
settings = dict(base_url=base, max_retries=0, timeout=60, _strict_response_validation=True)
client = anthropic.Anthropic(api_key=key, **settings)
listing = urllib.request.Request(base + "/v1/models", headers={"x-api-key": key})
model = json.load(urllib.request.urlopen(listing))["data"][0]["id"]
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
greedy = dict(model=model, max_tokens=limit, extra_body={"temperature": 0})
vision = pathlib.Path(__file__).resolve().parents[2] / "data/eval/vision.jsonl"


def text(message):
    return "".join(block.text for block in message.content if block.type == "text")


def messages():
    answer = client.messages.create(model=model, max_tokens=limit, messages=question, system="Be brief.")
    assert answer.type == "message" and answer.role == "assistant"
    assert answer.stop_reason in ("end_turn", "max_tokens"), answer
    count = client.messages.count_tokens(model=model, messages=question, system="Be brief.")
    assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    more = client.messages.count_tokens(model=model, messages=question, system="Be brief.", tools=tools)
    assert more.input_tokens > count.input_tokens
    if embedded:
        stopped = client.messages.create(messages=question, stop_sequences=["154"], **greedy)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "154"), stopped
    short = client.messages.create(messages=question, **(greedy | {"max_tokens": 3}))
    assert short.stop_reason == "max_tokens" and short.usage.output_tokens == 3, short


def streaming():
    seen = []
    with client.messages.stream(messages=question, **greedy) as stream:
        for event in stream:
            seen.append(event.type)
        final = stream.get_final_message()
    assert seen[0] == "message_start" and seen[-1] == "message_stop", seen
    whole = client.messages.create(messages=question, **greedy)
    assert text(final) == text(whole)
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert not embedded or "154" in text(final), final
    assert not embedded or "thinking" in seen, seen
    assert final.usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(messages=question, **greedy) as stream:
        assert "".join(stream.text_stream) == text(whole)
    # Somebody who goes away in the middle disturbs nobody.
    with client.messages.create(messages=question, stream=True, **greedy) as left:
        next(iter(left))
    assert text(client.messages.create(messages=question, **greedy)) == text(whole)


def tool_loop():
    ask = [{"role": "user", "content": "Tell me the weather in Ankara."}]
    options = dict(tools=tools, **greedy)
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
        with client.messages.stream(messages=ask, **options) as stream:
            assert text(stream.get_final_message()) == text(last)
    assert not embedded or [block.input for block in uses] == [{"city": "Ankara"}], first
    named = client.messages.create(messages=ask[:1], tool_choice={"type": "tool", "name": "get_weather"}, **options)
    assert named.stop_reason in ("tool_use", "max_tokens"), named


def thinking():
    options = dict(model=model, max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024})
    answer = client.messages.create(messages=question, **options)
    blocks = [block for block in answer.content if block.type == "thinking"]
    assert blocks and blocks[0].signature, answer
    with client.messages.stream(messages=question, **options) as stream:
        streamed = [block for block in stream.get_final_message().content if block.type == "thinking"]
    assert streamed and streamed[0].thinking and streamed[0].signature, streamed
    # The thoughts of an earlier turn come back as they went out.
    turns = question + [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "What is 2 plus 3?"}]
    again = client.messages.create(model=model, max_tokens=limit, messages=turns)
    assert again.stop_reason in ("end_turn", "max_tokens"), again


def images():
    item = json.loads(open(vision).readline())
    content = []
    for part in item["messages"][-1]["content"]:
        if part["type"] == "text":
            content.append({"type": "text", "text": part["text"]})
        else:
            data = part["image_url"]["url"].split(",", 1)[1]
            content.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}})
    answer = client.messages.create(messages=[{"role": "user", "content": content}], **greedy)
    assert not embedded or item["answer"] in text(answer), answer


def refused(kind, call):
    """The error that a call must end with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def errors():
    create = client.messages.create
    for call, kind, name in [
        (lambda: create(model="nothing", max_tokens=5, messages=question), anthropic.NotFoundError, "not_found_error"),
        (lambda: create(model=model, max_tokens=0, messages=question), anthropic.BadRequestError, "invalid_request_error"),
        (lambda: create(model=model, max_tokens=5, messages=[], stream=True), anthropic.BadRequestError, "invalid_request_error"),
    ]:
        error = refused(kind, call)
        assert error.body["type"] == "error" and error.body["error"]["message"], error.body
        assert error.body["error"]["type"] == name, error.body
    if key != "none":
        stranger = anthropic.Anthropic(api_key="wrong", **settings)
        refused(anthropic.AuthenticationError, lambda: stranger.messages.create(messages=question, **greedy))
        bearer = anthropic.Anthropic(auth_token=key, **settings)
        assert bearer.messages.count_tokens(model=model, messages=question).input_tokens


for test in (messages, streaming, tool_loop, thinking, images, errors):
    test()
    print("anthropic", anthropic.__version__, test.__name__, "ok")
