-- What scripts that change the books need: fresh epochs, events.

-- Fencing tokens grow by counter and by Redis time, whichever is further: books that fell back to
-- an older copy (a failover, a torn log) still issue epochs above all that they issued before.
-- `write_epoch` records, once, what a call has issued.
local function next_epoch()
  epoch = math.max(epoch + 1, now_us)
  issued = true
  return epoch
end

local function write_epoch()
  if issued then
    redis.call('HSET', KEY.books, 'epoch', integer(epoch))
    issued = false
  end
end

-- One field instead of one for each fact: an entry costs by its words. `rows.event` takes the
-- facts apart, in this order; '' stands for none.
-- What concerns one tenant alone carries its name beside them, the end of a reclaim its figures.
local function emit(kind, producer_id, consumer_id, lease_id, state, bytes, tenant, reclaim)
  local facts = table.concat({kind, producer_id or '', consumer_id or '', lease_id or '',
    state or '', bytes and integer(bytes) or ''}, ' ')
  if reclaim then
    redis.call('XADD', KEY.events, 'MAXLEN', '~', CONST.max_events, '*', 'event', facts,
      'tenant', tenant or '', 'reclaim', reclaim)
  elseif (tenant or '') == '' then
    redis.call('XADD', KEY.events, 'MAXLEN', '~', CONST.max_events, '*', 'event', facts)
  else
    redis.call('XADD', KEY.events, 'MAXLEN', '~', CONST.max_events, '*', 'event', facts,
      'tenant', tenant)
  end
end

-- An id that no record has: nobody can know it before, so nobody can have invented it before.
local function draw_id(prefix, noun, seed)
  local id
  repeat
    seed = redis.sha1hex(seed)
    id = noun .. string.sub(seed, 1, 16)
  until redis.call('EXISTS', prefix .. id) == 0
  return id
end
