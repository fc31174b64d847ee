"""Two replicas behind a balancer under load: one is drained and comes back, then one is killed and comes back.

python3 tests/deploy/balance.py GLIMMER [--balancer haproxy|nginx] [--clients 24] [--seconds 15]

Needs the balancer (Debian's package of that name). Exit code 1 when a drained replica cost a request, or a killed one
more than the streams that it was in the middle of.
"""

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from common import ROOT, Load, Replica, ask, free_port

parser = argparse.ArgumentParser()
parser.add_argument("program", help="the glimmer program")
parser.add_argument("--balancer", choices=["haproxy", "nginx"], default="haproxy")
parser.add_argument("--clients", type=int, default=24)
parser.add_argument("--seconds", type=float, default=15, help="of each phase")
arguments = parser.parse_args()
FLAGS = ["--max-num-seqs", "16", "--threads", "1"]


def balancer(ports, listen):
    """Starts it with the configuration that is shipped."""
    if arguments.balancer == "haproxy":
        places = {"LISTEN": f"127.0.0.1:{listen}"} | {f"REPLICA_{n}": f"127.0.0.1:{p}" for n, p in zip("AB", ports)}
        command = ["haproxy", "-db", "-f", str(ROOT / "deploy/haproxy.cfg")]
        return subprocess.Popen(command, env=os.environ | places, stderr=subprocess.DEVNULL)
    text = (ROOT / "deploy/nginx.conf").read_text().replace(":8080", f":{listen}")
    text = text.replace(":8000", f":{ports[0]}").replace(":8001", f":{ports[1]}")
    folder = tempfile.mkdtemp()
    temporary = re.sub("http {", f"http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;", text)
    with open(f"{folder}/nginx.conf", "w") as file:
        file.write(f"daemon off; pid {folder}/pid; error_log {folder}/log;\n" + temporary)
    return subprocess.Popen(["nginx", "-p", folder, "-c", f"{folder}/nginx.conf"])


def until_balanced(port, replicas):
    """Waits until every replica gets requests."""
    before = [replica.metric("vllm:request_success_total") for replica in replicas]
    while any(replica.metric("vllm:request_success_total") == old for replica, old in zip(replicas, before)):
        outcome = ask(port, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
        assert outcome.kind != "lost", f"the balancer is not there: {outcome.detail}"


def phase(name, port, middle):
    """Load; in its middle something happens. Counts outcomes."""
    load = Load(port, arguments.clients)
    time.sleep(arguments.seconds / 2)
    happened = time.monotonic()
    told = middle()
    time.sleep(arguments.seconds / 2)
    outcomes = load.stop()
    counts = collections.Counter(outcome.kind for outcome in outcomes)
    around = [o for o in outcomes if o.begun <= happened <= o.ended]
    print(f"{name}: {dict(counts)}, {len(around)} were under way when it happened; {told}", flush=True)
    for outcome in sorted((o for o in outcomes if o.kind != "whole"), key=lambda o: o.kind, reverse=True)[:5]:
        print(f"  {outcome.kind} after {outcome.ended - happened:.2f} s: {outcome.detail}")
    return counts


def main():
    replicas = [Replica(arguments.program, *FLAGS) for _ in range(2)]
    for replica in replicas:
        replica.ready()
    listen = free_port()
    proxy = balancer([replica.port for replica in replicas], listen)
    try:
        time.sleep(1.5)
        until_balanced(listen, replicas)
        faults = []

        def shares():
            return "answers by replica " + str([int(replica.metric("vllm:request_success_total")) for replica in replicas])

        counts = phase("both", listen, shares)
        if counts != {"whole": counts["whole"]}:
            faults.append("two healthy replicas")

        if arguments.balancer == "haproxy":
            before = [replica.metric("vllm:request_success_total") for replica in replicas]
            for turn in range(12):
                body = {"messages": [{"role": "user", "content": f"turn {turn}"}], "max_tokens": 2}
                assert ask(listen, body, {"x-session-id": "one conversation"}.items()).kind == "whole"
            grown = sorted(r.metric("vllm:request_success_total") - old for r, old in zip(replicas, before))
            print(f"a session of 12 turns: {grown} answers by replica")
            if grown != [0, 12]:
                faults.append("a session that moved")

        def drain():
            begun = time.monotonic()
            replicas[0].process.send_signal(signal.SIGTERM)
            code = replicas[0].process.wait()
            took = time.monotonic() - begun
            replicas[0] = Replica(arguments.program, *FLAGS, port=replicas[0].port).ready()
            return f"it ended with code {code} after {took:.1f} s"

        counts = phase("one drained", listen, drain)
        if counts != {"whole": counts["whole"]}:
            faults.append("a drained replica")
        time.sleep(3)
        until_balanced(listen, replicas)

        def kill():
            running = replicas[1].metric("vllm:num_requests_running") + replicas[1].metric("vllm:num_requests_waiting")
            replicas[1].process.kill()
            replicas[1].process.wait()
            time.sleep(2)
            replicas[1] = Replica(arguments.program, *FLAGS, port=replicas[1].port).ready()
            return f"it had {int(running)} requests"

        counts = phase("one killed", listen, kill)
        if set(counts) - {"whole", "cut"} or counts["cut"] > arguments.clients:
            faults.append("a killed replica")
        time.sleep(3)
        until_balanced(listen, replicas)
        print("both replicas answer again")
    finally:
        proxy.terminate()
        Replica.end_all()
    if faults:
        sys.exit(f"not as it should be: {', '.join(faults)}")


main()
