-- Reclaims: what producers measured, and what operators ordered.

local function close_reclaim(reclaim_id, producer_id, outcome)
  redis.call('HSET', KEY.reclaim .. reclaim_id, 'done', '1', 'outcome', outcome)
  redis.call('PEXPIRE', KEY.reclaim .. reclaim_id, CONST.ended_retention_ms)
  redis.call('ZREM', KEY.producer_reclaims .. producer_id, reclaim_id)
  redis.call('ZADD', KEY.ended_reclaims, integer(now_us), reclaim_id)
  emit(KIND.reclaim_closed, producer_id)
end
