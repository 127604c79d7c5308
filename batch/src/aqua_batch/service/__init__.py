"""`aqua batch serve`: OpenAI's Batch API, durable, in front of engines that speak OpenAI's HTTP.

From the ground up: `schema` and `database` (rows), `file_rows`, `batch_rows`, `request_rows`,
`keys` (what may happen to them), `objects` (bytes), `lines` and `results` (files to rows and back),
`engines` and `dispatch` (requests to engines), `routes` and `app` (HTTP), `server` (the process).
"""
