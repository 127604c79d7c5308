-- Reclaims: what producers measured, and what operators ordered.

local function is_decimal(text)
  return text and string.find(text, '^%-?%d[%d.e+-]*$') and tonumber(text) and true or false
end

-- reclaim_id, producer_id, origin, requested_bytes, returned_bytes, deadline_s, done, escalated,
-- first_slab_ms, total_ms: a ReclaimView; nil when there is no such reclaim, or a bad one.
local function reclaim_row(reclaim_id)
  local row = redis.call('HMGET', KEY.reclaim .. reclaim_id, 'producer_id', 'origin',
    'requested_bytes', 'returned_bytes', 'deadline_s', 'done', 'escalated', 'first_slab_ms',
    'total_ms')
  local sound = is_name(reclaim_id) and is_name(row[1])
    and (row[2] == 'producer' or row[2] == 'operator') and whole(row[3]) and whole(row[4])
    and is_decimal(row[5]) and row[6] and row[7]
    and (row[8] == '' or is_decimal(row[8])) and (row[9] == '' or is_decimal(row[9]))
  table.insert(row, 1, reclaim_id)
  return sound and row or nil
end

local function close_reclaim(reclaim_id, producer_id, outcome)
  redis.call('HSET', KEY.reclaim .. reclaim_id, 'done', '1', 'outcome', outcome)
  redis.call('PEXPIRE', KEY.reclaim .. reclaim_id, CONST.ended_retention_ms)
  redis.call('ZREM', KEY.producer_reclaims .. producer_id, reclaim_id)
  redis.call('ZADD', KEY.ended_reclaims, integer(now_us), reclaim_id)
  -- A record is kept for minutes, what the console shows for as long as the stream reaches back:
  -- the row, '' for none, and the outcome.
  local row, tenant = reclaim_row(reclaim_id), offer_of(producer_id).tenant
  local figures = row and table.concat(row, ' ') .. ' ' .. outcome
  if figures then
    redis.call('XADD', KEY.reclaim_history, 'MAXLEN', '~', CONST.max_reclaim_history, '*',
      'reclaim', figures, 'tenant', tenant or '')
  end
  emit(KIND.reclaim_closed, producer_id, nil, nil, nil, nil, tenant, figures)
end

-- What is listed as a reclaim, and has no record that could be read.
local function drop_reclaim(reclaim_id, producer_id)
  set_aside(KEY.reclaim .. reclaim_id, 'is no reclaim of ' .. producer_id)
  redis.call('DEL', KEY.reclaim .. reclaim_id)
  redis.call('ZREM', KEY.producer_reclaims .. producer_id, reclaim_id)
  redis.call('ZREM', KEY.reclaims, reclaim_id)
end
