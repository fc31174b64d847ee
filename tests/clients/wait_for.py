"""Waits until a URL answers 200: python wait_for.py URL PID; fails when the process ends before."""

import subprocess
import sys
import time
import urllib.error
import urllib.request

url, pid = sys.argv[1], sys.argv[2]
while True:
    try:
        if urllib.request.urlopen(url).status == 200:
            break
    except (urllib.error.URLError, ConnectionError):
        pass
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
    if not state or state.startswith("Z"):
        sys.exit("the server has ended before it was ready")
    time.sleep(0.1)
