-- The life of the books, the clock and the epochs: what `begin` reads for every call.
--
-- A library lives on between calls, so what a call knows is set anew at its start, and only here;
-- a call that failed half-way leaves nothing behind that the next one would see.
--
-- Two times: `now_us` is Redis time. `clock_us` is the time that leases and members age by. Only
-- `advance_clock`, a step of the sweep, lets it go on, and makes it stand. It never goes back,
-- whatever Redis time does.

local now_us, clock_us, paused_us, swept_us, standing, spread_us
local books_id, min_epoch, epoch, issued, planned, schema, has_quotas
local offers, leases, unwritten, growths, of_consumers, tenants, cohorts

local function redis_time_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- What the books say of themselves; nil when they are gone, or cannot be read, which is the same.
local function read_books()
  local field = redis.call('HMGET', KEY.books, 'books_id', 'min_epoch', 'epoch', 'paused_us',
    'swept_us', 'planned', 'standing', 'spread_us', 'secret', 'schema', 'quotas')
  local first, last = whole(field[2]), whole(field[3])
  local paused, swept = whole(field[4]), whole(field[5])
  if not (is_name(field[1]) and first and last and paused and swept
      and 0 < first and first <= last and last <= CONST.max_epoch
      and math.abs(swept - paused) <= CONST.max_epoch
      and field[9] and #field[9] % 2 == 0 and string.find(field[9], '^%x+$')) then
    return nil
  end
  return field[1], first, last, paused, swept, field[6] == '1', field[7] or '',
    whole(field[8]) or 0, field[9], whole(field[10]) or 1, (field[11] or '') ~= ''
end

-- The answer instead of the script's, when there are no books or their schema is not ours.
local function why_not_begin(only_reads)
  reading, faults = only_reads, {}
  local _
  books_id, min_epoch, epoch, paused_us, swept_us, planned, standing, spread_us, _, schema,
    has_quotas = read_books()
  if not books_id then
    return {'no_books'}
  elseif schema < CONST.min_schema or schema > CONST.max_schema then
    return {'schema', schema}
  end
  now_us = redis_time_us()
  issued = false
  offers, leases, unwritten, growths, of_consumers, tenants = {}, {}, {}, {}, {}, {}
  cohorts = {}
  -- Not swept for long: no coordinator is there. Redis time before the last sweep: it was set back.
  local stands = standing ~= '' or now_us - swept_us > CONST.max_gap_us or now_us < swept_us
  clock_us = (stands and swept_us or now_us) - paused_us
  return nil
end
