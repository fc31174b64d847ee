"""What the deployment checks share: replicas of `glimmer serve`, requests, free ports."""

import http.client
import json
import pathlib
import socket
import subprocess
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Replica:
    """A server of the embedded model. Killed at the end of the program."""

    all = []

    def __init__(self, program, *flags, port=None):
        self.port = port or free_port()
        command = [program, "serve", "--host", "127.0.0.1", "--port", str(self.port), "--uvicorn-log-level", "warning", *flags]
        self.process = subprocess.Popen([str(part) for part in command])
        Replica.all.append(self)

    def get(self, path, timeout=30):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def ready(self):
        while True:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
            try:
                if self.get("/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)

    def metric(self, name):
        """The sum of a metric over its labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    @staticmethod
    def end_all():
        for replica in Replica.all:
            replica.process.kill()


class Outcome:
    """What came of one request: `whole`, a `refused` status, `cut` in the middle of a stream, or `lost` without an answer."""

    def __init__(self, kind, begun, detail=""):
        self.kind, self.begun, self.ended, self.detail = kind, begun, time.monotonic(), detail


def ask(port, body, headers=()):
    """Sends a chat on a connection of its own."""
    begun = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    status = None
    try:
        sent = {"content-type": "application/json", "x-request-id": f"request-{begun}"} | dict(headers)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), sent)
        answer = connection.getresponse()
        status = answer.status
        text = answer.read().decode()
        if status != 200:
            return Outcome("refused", begun, f"{status}: {text[:200]}")
        if answer.headers["x-request-id"] != sent["x-request-id"]:
            return Outcome("refused", begun, "x-request-id was not echoed")
        ended = text.endswith("data: [DONE]\n\n") if body.get("stream") else "finish_reason" in text
        return Outcome("whole" if ended and '"error"' not in text else "cut", begun, text[-200:])
    except (OSError, http.client.HTTPException) as error:
        return Outcome("lost" if status is None else "cut", begun, repr(error))
    finally:
        connection.close()


class Load:
    """Clients that ask without pause until they are stopped."""

    def __init__(self, port, clients):
        self.outcomes, self.going = [], True
        self.threads = [threading.Thread(target=self.client, args=(port, number)) for number in range(clients)]
        for thread in self.threads:
            thread.start()

    def client(self, port, number):
        turn = 0
        while self.going:
            turn += 1
            question = f"What is {200 + (number * 37 + turn * 11) % 700} minus {(number * 13 + turn * 7) % 200}?"
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 200, "temperature": 1, "seed": turn}
            body |= {"stream": (number + turn) % 2 == 0, "ignore_eos": turn % 3 == 0}
            self.outcomes.append(ask(port, body))

    def stop(self):
        self.going = False
        for thread in self.threads:
            thread.join()
        return self.outcomes
