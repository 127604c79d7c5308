-- The life of the books, the clock and the epochs: what `begin` reads for every call.
--
-- A library lives on between calls, so what a call knows is set anew at its start, and only here;
-- a call that failed half-way leaves nothing behind that the next one would see.
--
-- Two times: `now_us` is Redis time. `clock_us` is the time that leases and members age by; it
-- stands still while no coordinator sweeps, because no member may expire for the absence
-- of those it should have reported to. It never goes back, whatever Redis time does.

local now_us, clock_us, paused_us, stood_still
local books_id, min_epoch, epoch, issued, planned
local offers, leases, unwritten, growths, of_consumers

local function redis_time_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- False when there are no books.
local function begin()
  local books = redis.call('HMGET', KEY.books, 'books_id', 'min_epoch', 'epoch', 'paused_us',
    'swept_us', 'planned')
  if not books[1] then
    return false
  end
  now_us = redis_time_us()
  books_id, min_epoch, epoch = books[1], tonumber(books[2]), tonumber(books[3])
  issued, planned = false, books[6] == '1'
  offers, leases, unwritten, growths, of_consumers = {}, {}, {}, {}, {}
  paused_us = tonumber(books[4])
  local unswept_us = now_us - tonumber(books[5])
  stood_still = unswept_us > CONST.max_gap_us or unswept_us < 0
  if stood_still then
    paused_us = paused_us + unswept_us
  end
  clock_us = now_us - paused_us
  return true
end
