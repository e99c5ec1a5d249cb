"""`python -m sglang.launch_server` without SGLang: its flags, endpoints and log lines, and a clock instead of a model.

A step takes SLOW_S; a config file for both projections makes it FAST_S where the Triton backend serves, which alone
looks files up. `auto` is Intel's own kernel on this device: it looks nothing up and always takes SLOW_S.
"""

import argparse
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SCALE = float(os.environ.get("STANDIN_SCALE", "1"))  # a slower clock forgives a slower machine: lag is judged by it
SLOW_S, FAST_S, EAGER_S = 0.050 * SCALE, 0.030 * SCALE, 0.005 * SCALE
SHAPE = "E=64,N=896,device_name=Intel(R)_Arc(TM)_Pro_B60_Graphics"


def flags():
    parser = argparse.ArgumentParser()
    for name in ("model-path", "host", "moe-runner-backend", "dtype", "load-format", "cuda-graph-backend-decode",
                 "cuda-graph-backend-prefill"):  # fmt: skip
        parser.add_argument(f"--{name}")
    for name in ("port", "random-seed", "tp-size", "ep-size", "max-running-requests", "context-length"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--disable-radix-cache", action="store_true")
    return parser.parse_args()


def lookup():
    """SGLang's own lookup, as far as an empty tree and an exact file go; whether both projections have one."""
    folder = Path(os.environ["SGLANG_MOE_CONFIG_DIR"]) / "configs" / "triton_3_8_0"
    found = []
    for suffix in ("", "_down"):
        file = folder / f"{SHAPE}{suffix}.json"
        found.append(file.is_file())
        if file.is_file():
            print(f"Using MoE kernel config from {file}.", flush=True)
        else:
            print("Using default MoE kernel config. Performance might be sub-optimal! "
                  f"Config file not found at {file}, you can create them with the tuner", flush=True)  # fmt: skip
    return all(found)


class Server:
    def __init__(self, args):
        self.args = args
        eager = args.cuda_graph_backend_decode == "disabled"
        tuned = args.moe_runner_backend == "triton" and lookup()
        self.step_s = (FAST_S if tuned else SLOW_S) + (EAGER_S if eager else 0.0)
        self.running = 0
        self.turn = threading.Lock()

    def begin(self, tokens):
        with self.turn:
            self.running += 1
            print(f"Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0", flush=True)

    def step(self):
        time.sleep(self.step_s)
        print(f"Decode batch, #running-req: {self.running}, #token: 0", flush=True)

    def end(self):
        with self.turn:
            self.running -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of = None

    def log_message(self, *args):
        pass

    def do_GET(self):
        args = self.server_of.args
        answers = {
            "/health": {},
            "/server_info": {"moe_runner_backend": args.moe_runner_backend, "version": "0.5.23"},
            "/v1/models": {"data": [{"id": "standin", "max_model_len": 8192}]},
        }
        self.answer(answers[self.path])

    def answer(self, document):
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server_of.begin(len(body["prompt"]))
        (self.stream if body.get("stream") else self.whole)(body["prompt"], body["max_tokens"])

    def whole(self, prompt, count):
        """One answer, of the question alone, so that both arms say the same; in one step, because nothing is timed."""
        self.server_of.step()
        self.server_of.end()
        tokens = [(sum(prompt) + place) % 1000 for place in range(count)]
        choice = {"text": "", "token_ids": tokens, "logprobs": {"token_logprobs": [-0.1] * count}}
        self.answer({"choices": [choice]})

    def stream(self, prompt, count):
        """A token a step, then the usage."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(count):
            self.server_of.step()
            self.event({"choices": [{"text": "t"}]})
        self.server_of.end()
        self.event({"choices": [], "usage": {"completion_tokens": count, "prompt_tokens": len(prompt)}})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, document):
        self.chunk(f"data: {json.dumps(document)}\n\n".encode())

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


if __name__ == "__main__":
    arguments = flags()
    Handler.server_of = Server(arguments)
    Listener((arguments.host, arguments.port), Handler).serve_forever()
