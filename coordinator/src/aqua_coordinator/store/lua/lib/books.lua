-- The life of the books, the clock and the epochs.
--
-- Two times: `now_us` is Redis time. `clock_us` is the time that leases and members age by; it
-- stands still while no coordinator sweeps, because nobody may expire for the absence of those
-- whom he should have reported to. It never goes back, whatever Redis time does.

local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
local books = redis.call('HMGET', KEYS[1], 'books_id', 'min_epoch', 'epoch', 'paused_us', 'swept_us', 'planned')
if not books[1] then
  return {'no_books'}
end
local books_id, min_epoch, epoch = books[1], tonumber(books[2]), tonumber(books[3])
local paused_us = tonumber(books[4])
local planned = books[6] == '1'

local unswept_us = now_us - tonumber(books[5])
local stood_still = unswept_us > CONST.max_gap_us or unswept_us < 0
if stood_still then
  paused_us = paused_us + unswept_us
end
local clock_us = now_us - paused_us
