-- Which producer lends: the placer's pairing if there is one, else best fit inside the domain; of
-- those that meet the terms of the request, and of the suspected only if there is no other.

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

-- What a producer must meet. `avoided` is what the consumer's record says of failed attaches.
local function terms_of(request, avoided)
  local terms = {request = request, excluded = said_in(avoided), ruled_out = 0}
  for _, producer_id in ipairs(request.exclude or {}) do
    terms.excluded[producer_id] = true
  end
  return terms
end

-- Of a listed producer; one that does not exist is found out by `lender`.
local function meets(terms, producer_id)
  local offer, request = offer_of(producer_id), terms.request
  if offer.exists and (terms.excluded[producer_id]
      or terms.excluded[producer_id .. '@' .. offer.incarnation]
      or (request.transport or offer.transport) ~= offer.transport
      or (request.slab_bytes or offer.slab_bytes) ~= offer.slab_bytes
      or (request.node or offer.node) ~= offer.node) then
    terms.ruled_out = terms.ruled_out + 1
    return false
  end
  local _, voices = said_in(offer.unreachable)
  local is_passed_over = voices >= CONST.suspicion_voices and not terms.takes_suspected
  terms.has_passed_over = terms.has_passed_over or is_passed_over
  return not is_passed_over
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

-- The first producer of the domain that meets the terms, as a command lists them from one count of
-- free bytes to another; and these. Mostly it is the first of all.
local function first_listed(command, domain, from, to, terms)
  local at, size, page = 0, 1, nil
  repeat
    page = redis.call(command, KEY.free .. domain, from, to, 'WITHSCORES', 'LIMIT', at, size)
    for index = 1, #page, 2 do
      if meets(terms, page[index]) then
        return page[index], listed_bytes(page[index + 1])
      end
    end
    at, size = at + size, CONST.max_candidates - 1
  until #page == 0 or at >= CONST.max_candidates
  return nil, 0
end

-- The producer with the most free bytes, and these: what a lease could get at most.
local function largest(domain, pairing, terms)
  refresh_free(domain)
  if not pairing then
    return first_listed('ZREVRANGEBYSCORE', domain, '+inf', '-inf', terms)
  end
  local best, most = nil, 0
  for _, producer_id in ipairs(pairing) do
    local free = listed_bytes(redis.call('ZSCORE', KEY.free .. domain, producer_id))
    if free > most and meets(terms, producer_id) then
      best, most = producer_id, free
    end
  end
  return best, most
end

-- The first of the pairing, or the tightest of the domain, that has `bytes` free; else nil.
local function fitting(domain, pairing, bytes, terms)
  refresh_free(domain)
  if not pairing then
    return (first_listed('ZRANGEBYSCORE', domain, integer(bytes), '+inf', terms))
  end
  for _, producer_id in ipairs(pairing) do
    if listed_bytes(redis.call('ZSCORE', KEY.free .. domain, producer_id)) >= bytes
        and meets(terms, producer_id) then
      return producer_id
    end
  end
  return nil
end

-- A producer that lends at least `least` bytes, the first or tightest for `bytes`, and its offer;
-- else nil and the most that there is. What the list tells wrong is put right.
local function lender(domain, pairing, bytes, least, terms)
  for _ = 1, CONST.max_wrong_listings do
    local producer_id, most = fitting(domain, pairing, bytes, terms), bytes
    if not producer_id then
      terms.ruled_out = 0
      producer_id, most = largest(domain, pairing, terms)
    end
    if producer_id and most >= least then
      local offer = offer_of(producer_id)
      if offer.exists and offer.grantable and offer.domain == domain
          and offer.offered - offer.leased >= least then
        return producer_id, offer
      end
      set_aside(KEY.free .. domain, producer_id .. ' is listed with what it does not lend')
      strike(KEY.free .. domain, producer_id)
      offer.changed = offer.exists
    elseif terms.has_passed_over and not terms.takes_suspected then
      terms.takes_suspected = true
    else
      return nil, most
    end
  end
  return nil, 0
end
