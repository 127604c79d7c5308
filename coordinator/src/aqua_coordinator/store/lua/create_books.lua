-- Open the books in an empty Redis, or read whose they are.
--
-- ARGV[1]  books_id: name of the new books
-- ARGV[2]  secret: for capability tokens, hexadecimal
-- Calls    read_books, integer, redis_time_us
-- Result   {'ok', books_id, secret, created (1 or 0)}
--
-- The first epoch is the Redis time in microseconds, so epochs grow across a loss of the books.

local books_id, _, _, _, _, _, _, _, secret, schema = read_books()
if books_id and (schema < CONST.min_schema or schema > CONST.max_schema) then
  return {'schema', schema}
elseif books_id then
  return {'ok', books_id, secret, 0}
end
local now = integer(redis_time_us())
redis.call('HSET', KEYS[1], 'books_id', ARGV[1], 'secret', ARGV[2], 'min_epoch', now, 'epoch', now,
  'paused_us', '0', 'swept_us', now, 'schema', integer(CONST.min_schema))
redis.call('XADD', KEY.events, 'MAXLEN', '~', CONST.max_events, '*', 'event',
  KIND.books_created .. '     ')
return {'ok', ARGV[1], ARGV[2], 1}
