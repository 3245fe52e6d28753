"""A no-op on LitServe: `python -m benchmarks.peers.litserve_app PORT`."""

from __future__ import annotations

import sys

import litserve


class Noop(litserve.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["value"]

    def predict(self, value):
        return value

    def encode_response(self, output):
        return {"output": output}


if __name__ == "__main__":
    server = litserve.LitServer(Noop(), accelerator="cpu")
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False
    )
