"""The yardstick of `coordinator.py`: a FastAPI application whose one operation does nothing.

It reads a body of the size of a lease request into a pydantic model and answers with another, on
the same server with the same options as the coordinator. No store, no authentication, no metrics.
"""

from __future__ import annotations

import socket
import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from aqua_coordinator.server import SERVER_OPTIONS

app = FastAPI()


class Request(BaseModel):
    """As much as a lease request."""

    consumer_id: str
    bytes: int
    ttl_s: float


class Answer(BaseModel):
    """Less than a lease."""

    lease_id: str
    epoch: int


@app.post("/v1/leases", status_code=201)
async def grant(body: Request) -> Answer:
    """Answer at once."""
    return Answer(lease_id=body.consumer_id, epoch=body.bytes)


if __name__ == "__main__":
    listener = socket.socket()
    listener.bind(("127.0.0.1", int(sys.argv[1])))
    uvicorn.Server(uvicorn.Config(app, **SERVER_OPTIONS)).run(sockets=[listener])
