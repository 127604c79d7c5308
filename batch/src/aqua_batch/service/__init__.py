"""`aqua batch serve`: OpenAI's Batch API, durable, in front of engines that speak OpenAI's HTTP.

From the ground up: `rows` (what lasts), `files` (bytes, into rows and out of them), `order` (which
request goes first), `dispatch` (requests to engines, outcomes to rows), `routes`, `online` and
`app` (HTTP), `server` (the process), `cli` and `client` (the commands).
"""
