"""Prometheus against a server: python3 tests/deploy/scrape.py GLIMMER [--seconds 20]

`promtool check metrics` must find nothing to say, every scrape under load must succeed, and the values in the database must be
those of the server. Needs Debian's package prometheus.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from common import ROOT, Load, Replica, free_port

parser = argparse.ArgumentParser()
parser.add_argument("program", help="the glimmer program")
parser.add_argument("--seconds", type=float, default=20)
arguments = parser.parse_args()


def main():
    drafts = '{"method": "mtp", "num_speculative_tokens": 2}'
    server = Replica(arguments.program, "--speculative-config", drafts).ready()
    port = free_port()
    text = (ROOT / "deploy/prometheus.yml").read_text().replace(":8000", f":{server.port}").replace("5s", "1s")
    folder = tempfile.mkdtemp()
    with open(f"{folder}/prometheus.yml", "w") as file:
        file.write(text)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    prometheus = subprocess.Popen(command)

    def api(path, **query):
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        return json.load(urllib.request.urlopen(url))["data"]

    def value(query):
        found = api("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    try:
        load = Load(server.port, 8)
        time.sleep(arguments.seconds)
        outcomes = load.stop()
        time.sleep(3)
        faults = [outcome.detail for outcome in outcomes if outcome.kind != "whole"]
        metrics = server.get("/metrics")[1]
        tool = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True)
        # Dashboards demand these names; code 3 is that there are remarks, 1 that the text cannot be read.
        demanded = ("should not contain ':'", 'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix')
        remarks = [line for line in (tool.stdout + tool.stderr).splitlines() if line.strip()]
        others = [line for line in remarks if not line.endswith(demanded)]
        print(f"promtool check metrics: code {tool.returncode}, {len(remarks)} remarks on demanded names, {len(others)} others")
        if tool.returncode not in (0, 3) or others:
            faults.append(f"promtool: {others}")
        (target,) = api("targets")["activeTargets"]
        print(f"target: {target['health']}, last error {target['lastError']!r}")
        window = f"[{int(arguments.seconds)}s]"
        scrapes, up = value(f"count_over_time(up{window})"), value(f"avg_over_time(up{window})")
        took = value(f"max_over_time(scrape_duration_seconds{window})")
        samples = value("scrape_samples_scraped")
        print(f"{scrapes:.0f} scrapes, {100 * up:.0f} % succeeded, {samples:.0f} samples each, {1000 * took:.1f} ms at most")
        if target["health"] != "up" or up != 1:
            faults.append("a scrape failed")
        for name in ["generation_tokens_total", "time_to_first_token_seconds_count", "spec_decode_num_accepted_tokens_total"]:
            stored, here = value("vllm:" + name), server.metric("vllm:" + name)
            print(f"vllm:{name}: {stored} stored, {here} on the server")
            if stored != here or not here:
                faults.append(f"{name} differs")
        rate = value(f"histogram_quantile(0.99, rate(vllm:inter_token_latency_seconds_bucket{window}))")
        print(f"{len(outcomes)} answers; 99 % of the steps took less than {1000 * rate:.0f} ms, as Prometheus computes it")
    finally:
        prometheus.terminate()
        Replica.end_all()
    if faults:
        sys.exit(f"not as it should be: {faults[:5]}")


main()
