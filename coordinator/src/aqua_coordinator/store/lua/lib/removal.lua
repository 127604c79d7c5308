-- A producer leaves the books. Its leases must have been unbooked before; `domain` is false when
-- its record was lost.

local function forget_producer(producer_id, domain)
  for _, reclaim_id in ipairs(redis.call('ZRANGE', KEY.producer_reclaims .. producer_id, 0, -1)) do
    close_reclaim(reclaim_id, producer_id, 'producer_lost')
  end
  local tenant = offer_of(producer_id).tenant
  if tenant ~= '' then
    redis.call('ZREM', KEY.producers_of .. tenant, producer_id)
  end
  redis.call('DEL', KEY.producer .. producer_id)
  redis.call('ZREM', KEY.producers, producer_id)
  redis.call('ZREM', KEY.producers_seen, producer_id)
  if domain then
    redis.call('ZREM', KEY.free .. domain, producer_id)
    redis.call('SREM', KEY.unconfirmed .. domain, producer_id)
  end
  emit(KIND.producer_lost, producer_id)
end

local function forget_consumer(consumer_id)
  local tenant = redis.call('HGET', KEY.consumer .. consumer_id, 'tenant') or ''
  if tenant ~= '' then
    redis.call('ZREM', KEY.consumers_of .. tenant, consumer_id)
  end
  redis.call('DEL', KEY.consumer .. consumer_id)
  redis.call('ZREM', KEY.consumers, consumer_id)
  redis.call('ZREM', KEY.consumers_seen, consumer_id)
  emit(KIND.consumer_lost, nil, consumer_id, nil, nil, nil, tenant)
end
