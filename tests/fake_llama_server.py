"""A program that speaks like a llama-server, and fails as it is told: for tests of the benchmark.

Its text repeats the last token of the prompt plus one.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = '''
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

HELP = """usage
  -m, --model FNAME    model
  -md, --model-draft FNAME
  -c, --ctx-size N
  -t, --threads N
  --cache-ram N
  --spec-type TYPE[:k=v]   types: none, draft, ngram-mod, suffix
                           examples: --spec-type ngram-mod:n_max=3
  --host HOST
  --port PORT
"""
given = sys.argv[1:]
if "--help" in given:
    sys.exit(print(HELP) or 0)
if "--version" in given:
    sys.exit(print("version: 7 (fake)", file=sys.stderr) or 0)

def value(name, default=None):
    return given[given.index(name) + 1] if name in given else default

fault, mode = value("--fault"), value("--spec-type", "plain")
if fault in ("start", "start " + mode):
    sys.exit("error: cannot load " + value("-m"))
if fault == "log":
    Path = __import__("pathlib").Path
    with open(value("-m") + ".log", "a") as log:
        log.write(str(os.getpid()) + " " + json.dumps(given) + "\\n")
begin, asked = time.monotonic(), 0

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def answer(self, status, content):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        slow = fault == "slow" and time.monotonic() - begin < 0.5
        self.answer(503 if slow or fault == "never" else 200, b"{}")

    def do_POST(self):
        global asked
        asked += 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fault == "crash" and asked > 1:
            sys.stderr.write("error: out of luck\\n")
            sys.stderr.flush()
            os._exit(3)
        if fault == "hang" and asked > 1:
            time.sleep(60)
        if fault == "json":
            return self.answer(200, b"<html>")
        if fault == "status":
            return self.answer(500, b"no room")
        prompt, count = request["prompt"], request["n_predict"]
        assert request["cache_prompt"] is False and request["temperature"] == 0
        accepted = 0 if mode == "plain" else count // 2
        text = [prompt[-1] + 1] * count
        if fault == "other " + mode:
            text[-1] += 1
        found = {
            "content": " ".join(map(str, text)),
            "tokens_evaluated": len(prompt),
            "timings": {
                "prompt_n": len(prompt) - (fault == "cached"), "prompt_ms": 2.0,
                "predicted_n": count, "predicted_ms": 10.0,
                "draft_n": count, "draft_n_accepted": accepted,
            },
        }
        if fault != "text":
            found["tokens"] = text
        if fault == "keys":
            del found["timings"]["predicted_n"]
        self.answer(200, json.dumps(found).encode())

HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
'''


def executable(folder: Path, name: str = "llama-server") -> Path:
    """The program, in a folder."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{SOURCE}", "utf-8")
    path.chmod(0o755)
    return path
