"""OpenVINO GenAI's continuous batching behind as much of Chat Completions as a load test asks for.

python openvino_server.py FOLDER [--port N] [--threads N] [--cache-gib N]

FOLDER is what `optimum-cli export openvino` wrote. Answers are greedy and streamed. Runs in an
environment with openvino-genai; it is a peer to measure, not a server to use.
"""

import argparse
import itertools
import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import openvino
import openvino_genai
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Prompts of running requests are computed in pieces of so many tokens.
BATCHED_TOKENS = 256


@dataclass(slots=True)
class Job:
    """A request on its way; `tokens` gets those of each step, then None."""

    ids: list[int]
    max_tokens: int
    ignore_eos: bool
    tokens: "queue.SimpleQueue[list[int] | None]" = field(default_factory=queue.SimpleQueue)


class Engine:
    """The pipeline, stepped by a thread of its own."""

    def __init__(self, folder: Path, threads: int, cache_gib: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        scheduler.max_num_seqs = 64
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", properties
        )
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, job: Job) -> Iterator[list[int]]:
        """The job's tokens as they come."""
        self._waiting.put(job)
        return iter(job.tokens.get, None)

    def _run(self) -> None:
        running: dict[int, tuple[Any, Job]] = {}
        numbers = itertools.count()
        while True:
            while not running or not self._waiting.empty():
                job = self._waiting.get()
                number = next(numbers)
                prompt = openvino.Tensor(np.array([job.ids], dtype=np.int64))
                handle = self._pipeline.add_request(number, prompt, self._how(job))
                running[number] = (handle, job)
            self._pipeline.step()
            for number, (handle, job) in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        job.tokens.put(list(output.generated_ids))
                if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                    job.tokens.put(None)
                    del running[number]
            self._let_write([job for _, job in running.values()])

    def _how(self, job: Job) -> Any:
        how = openvino_genai.GenerationConfig()
        how.max_new_tokens = job.max_tokens
        how.do_sample = False
        how.ignore_eos = job.ignore_eos
        how.eos_token_id = self._eos
        return how

    def _let_write(self, jobs: list[Job]) -> None:
        """`step` keeps the interpreter's lock: what it computed is written before the next."""
        for _ in range(200):
            if all(job.tokens.empty() for job in jobs):
                return
            threading.Event().wait(0.0001)


class Handler(BaseHTTPRequestHandler):
    """One connection; the class's fields are set by `main`."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    tokenizer: Tokenizer
    template: jinja2.Template
    name: str

    def do_GET(self) -> None:
        """/health and /v1/models."""
        self._whole({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def do_POST(self) -> None:
        """/v1/chat/completions."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = self.template.render(messages=asked["messages"], add_generation_prompt=True)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        job = Job(ids, asked.get("max_tokens", 48), bool(asked.get("ignore_eos")))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        decoder, count = DecodeStream(skip_special_tokens=False), 0
        for tokens in self.engine.submit(job):
            count += len(tokens)
            pieces = [decoder.step(self.tokenizer, token) for token in tokens]
            if said := "".join(piece for piece in pieces if piece):
                delta = {"index": 0, "delta": {"content": said}, "finish_reason": None}
                self._event({"object": "chat.completion.chunk", "choices": [delta]})
        end = {"index": 0, "delta": {}, "finish_reason": "length"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": count}
        self._event({"object": "chat.completion.chunk", "choices": [end], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _whole(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8204)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gib", type=int, default=2)
    options = parser.parse_args()
    folder: Path = options.folder
    Handler.engine = Engine(folder, options.threads, options.cache_gib)
    Handler.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    Handler.template = jinja2.Environment().from_string(
        (folder / "chat_template.jinja").read_text()
    )
    Handler.name = folder.name
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    server.request_queue_size = 128
    print(f"openvino: ready on {options.port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
