"""What survives the death of every process: the tables, and what may happen to their rows.

`schema` says what the tables are and `migrations` makes them; `batch_rows`, `file_rows` and
`request_rows` are all that changes them; `keys` and `quotas` say who may. Locks are taken in one
order, which `request_rows` says.
"""
