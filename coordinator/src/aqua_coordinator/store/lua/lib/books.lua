-- The life of the books, the clock and the epochs: what `begin` reads for every call.
--
-- A library lives on between calls, so what a call knows is set anew at its start, and only here;
-- a call that failed half-way leaves nothing behind that the next one would see.
--
-- Two times: `now_us` is Redis time. `clock_us` is the time that leases and members age by. Only
-- `advance_clock`, a step of the sweep, lets it go on, and makes it stand. It never goes back,
-- whatever Redis time does.

local now_us, clock_us, paused_us, swept_us, standing, spread_us
local books_id, min_epoch, epoch, issued, planned
local offers, leases, unwritten, growths, of_consumers

local function redis_time_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- False when there are no books.
local function begin()
  local books = redis.call('HMGET', KEY.books, 'books_id', 'min_epoch', 'epoch', 'paused_us',
    'swept_us', 'planned', 'standing', 'spread_us')
  if not books[1] then
    return false
  end
  now_us = redis_time_us()
  books_id, min_epoch, epoch = books[1], tonumber(books[2]), tonumber(books[3])
  issued, planned = false, books[6] == '1'
  offers, leases, unwritten, growths, of_consumers = {}, {}, {}, {}, {}
  paused_us, swept_us = tonumber(books[4]), tonumber(books[5])
  standing, spread_us = books[7] or '', tonumber(books[8] or 0)
  -- Not swept for long: no coordinator is there. Redis time before the last sweep: it was set back.
  local stands = standing ~= '' or now_us - swept_us > CONST.max_gap_us or now_us < swept_us
  clock_us = (stands and swept_us or now_us) - paused_us
  return true
end
