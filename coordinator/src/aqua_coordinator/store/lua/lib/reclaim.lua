-- Reclaims: what producers measured, and what operators ordered.

-- reclaim_id, producer_id, origin, requested_bytes, returned_bytes, deadline_s, done, escalated,
-- first_slab_ms, total_ms: a ReclaimView; nil when there is no such reclaim.
local function reclaim_row(reclaim_id)
  local row = redis.call('HMGET', KEY.reclaim .. reclaim_id, 'producer_id', 'origin',
    'requested_bytes', 'returned_bytes', 'deadline_s', 'done', 'escalated', 'first_slab_ms',
    'total_ms')
  table.insert(row, 1, reclaim_id)
  return row[2] and row or nil
end

local function close_reclaim(reclaim_id, producer_id, outcome)
  redis.call('HSET', KEY.reclaim .. reclaim_id, 'done', '1', 'outcome', outcome)
  redis.call('PEXPIRE', KEY.reclaim .. reclaim_id, CONST.ended_retention_ms)
  redis.call('ZREM', KEY.producer_reclaims .. producer_id, reclaim_id)
  redis.call('ZADD', KEY.ended_reclaims, integer(now_us), reclaim_id)
  emit(KIND.reclaim_closed, producer_id)
end
