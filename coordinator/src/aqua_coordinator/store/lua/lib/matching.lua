-- Which producer lends: the placer's pairing if there is one, else best fit inside the domain.

-- The free bytes that a list says, if it can be so.
local function listed_bytes(score)
  local bytes = whole(score)
  return bytes and bytes > 0 and bytes <= CONST.max_bytes and bytes or 0
end

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
    return top[1], listed_bytes(top[2])
  end
  local best, most = nil, 0
  for _, producer_id in ipairs(pairing) do
    local free = listed_bytes(redis.call('ZSCORE', KEY.free .. domain, producer_id))
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
    if listed_bytes(redis.call('ZSCORE', KEY.free .. domain, producer_id)) >= bytes then
      return producer_id
    end
  end
  return nil
end

-- A producer that lends at least `least` bytes, the first or tightest for `bytes`, and its offer;
-- else nil and the most that there is. What the list tells wrong is put right.
local function lender(domain, pairing, bytes, least)
  for _ = 1, CONST.max_wrong_listings do
    local producer_id, most = fitting(domain, pairing, bytes), bytes
    if not producer_id then
      producer_id, most = largest(domain, pairing)
    end
    if not producer_id or most < least then
      return nil, most
    end
    local offer = offer_of(producer_id)
    if offer.exists and offer.grantable and offer.domain == domain
        and offer.offered - offer.leased >= least then
      return producer_id, offer
    end
    set_aside(KEY.free .. domain, producer_id .. ' is listed with what it does not lend')
    strike(KEY.free .. domain, producer_id)
    offer.changed = offer.exists
  end
  return nil, 0
end
