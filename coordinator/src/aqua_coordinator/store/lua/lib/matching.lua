-- Which producer lends: the placer's pairing if there is one, else best fit inside the domain.

-- The producers of a pairing, best first; nil when the placer has said nothing.
local function pairing_of(consumer_id)
  local text = planned and redis.call('HGET', KEY.placements, consumer_id)
  if not text then
    return nil
  end
  local producers = {}
  for producer_id in string.gmatch(text, '%S+') do
    producers[#producers + 1] = producer_id
  end
  return producers
end

-- Write the list of free bytes that is about to be read, if scripts of the same call changed it.
local function refresh_free(domain)
  for producer_id, offer in pairs(offers) do
    if offer.changed then
      list_offer(producer_id, offer)
    end
  end
  write_list(KEY.free .. domain)
end

-- The producer with the most free bytes, and these: what a lease could get at most.
local function largest(domain, pairing)
  refresh_free(domain)
  if not pairing then
    local top = redis.call('ZREVRANGE', KEY.free .. domain, 0, 0, 'WITHSCORES')
    return top[1], tonumber(top[2] or 0)
  end
  local best, most = nil, 0
  for _, producer_id in ipairs(pairing) do
    local free = tonumber(redis.call('ZSCORE', KEY.free .. domain, producer_id) or 0)
    if free > most then
      best, most = producer_id, free
    end
  end
  return best, most
end

-- The first of the pairing, or the tightest of the domain, that has `bytes` free; else nil.
local function fitting(domain, pairing, bytes)
  refresh_free(domain)
  if not pairing then
    return redis.call('ZRANGEBYSCORE', KEY.free .. domain, integer(bytes), '+inf',
      'LIMIT', 0, 1)[1]
  end
  for _, producer_id in ipairs(pairing) do
    if tonumber(redis.call('ZSCORE', KEY.free .. domain, producer_id) or 0) >= bytes then
      return producer_id
    end
  end
  return nil
end
