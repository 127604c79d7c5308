-- An owner wants back what its cohort has borrowed: rights of borrowers end, newest first.
--
-- ARGV[1]  request: the LeaseRequest that was refused, as JSON without nulls
-- ARGV[2]  as_tenant: whose the caller's token is, or ''
-- Calls    headroom, is_visible, borrowed_by_others, offer_of, leases_on, pairing_of, terms_of,
--          meets, lender, is_name, integer, step, save
-- Result   {'ok', ended, bytes}: leases whose right ends, and their bytes
--
-- Only within the nominal quota of the asker's tenant, only leases of tenants that are beyond
-- theirs at that moment, and only if a producer that the request may have can then lend it. What is
-- on its way back already counts, so that a request that is repeated ends no more than one. The
-- bytes stay booked until their producer has them back; until the owner has had time to ask again,
-- its cohort does not borrow.

local request = cjson.decode(ARGV[1])
local consumer_id, least = request.consumer_id, request.min_bytes or request.bytes
local known = redis.call('HMGET', KEY.consumer .. consumer_id, 'domain', 'avoided', 'tenant',
  'leased_bytes')
local domain, tenant = known[1], known[3] or ''
if not is_name(domain) or not is_visible(tenant, ARGV[2]) then
  return {'ok', 0, 0}
end
local room = headroom(tenant, consumer_id, known[4], least)
if borrowed_by_others(room, least) == 0 then
  return {'ok', 0, 0}
end
local waits = KEY.quota_waits .. room.cohort
local until_us = clock_us + CONST.owner_waits_us
local rested_us = until_us - (tonumber(redis.call('ZSCORE', waits, tenant) or 0))
if rested_us >= 0 and rested_us < CONST.owner_rests_us then
  return {'ok', 0, 0}
end

local pairing, terms = pairing_of(consumer_id), terms_of(request, known[2])
local may_lend, places = {}, {}
for _, producer_id in ipairs(pairing or {}) do
  may_lend[producer_id] = true
end
terms.takes_suspected = true
-- What a producer that the request may have has free, or gets back; false for others.
local function place_of(producer_id)
  if places[producer_id] == nil then
    local offer = offer_of(producer_id)
    local fits = offer.exists and offer.grantable and offer.domain == domain
      and (not pairing or may_lend[producer_id]) and meets(terms, producer_id)
    places[producer_id] = fits and {free = offer.offered - offer.leased, of = {}} or false
  end
  return places[producer_id]
end
local first = lender(domain, pairing, least, least, terms)
if first then
  place_of(first)
end

-- Leases of borrowers, those of who has borrowed most first.
local left, freed, candidates, seen = {}, {}, {}, 0
local function look_at(lease)
  local place = place_of(lease.producer_id)
  seen = seen + 1
  if RIGHTFUL[lease.state] then
    candidates[#candidates + 1] = lease
    if place then
      place.of[lease.tenant] = (place.of[lease.tenant] or 0) + lease.bytes
    end
  else
    left[lease.tenant] = left[lease.tenant] - lease.bytes
    freed[lease.tenant] = freed[lease.tenant] + lease.bytes
    if place then
      place.free = place.free + lease.bytes
    end
  end
end
table.sort(room.members, function(one, other)
  return one.leased - one.nominal > other.leased - other.nominal
end)
for _, member in ipairs(room.members) do
  left[member.name], freed[member.name] = member.leased - member.nominal, 0
  local names = left[member.name] > 0 and redis.call('ZREVRANGE', KEY.tenant_leased .. member.name,
    0, CONST.max_candidates) or {}
  for _, name in ipairs(names) do
    if seen >= CONST.max_scan then
      break
    end
    for _, lease in ipairs(leases_on(KEY.consumer_leases, 'consumer_id', name, true,
        CONST.max_candidates)) do
      if lease.tenant == member.name then
        look_at(lease)
      end
    end
  end
end
table.sort(candidates, function(one, other)
  return one.granted_epoch > other.granted_epoch
end)

-- A lease is of one producer: the one that can then lend most, and of these who takes least back.
local wanted, best, most, missing = math.min(request.bytes, room.owned), nil, 0, 0
for producer_id, place in pairs(places) do
  local can = place and place.free or 0
  for name, bytes in pairs(place and place.of or {}) do
    can = can + math.max(0, math.min(bytes, left[name]))
  end
  can = math.min(can, wanted)
  local lacks = place and math.max(0, can - place.free) or 0
  if can >= least and (can > most or can == most
      and (lacks < missing or lacks == missing and producer_id < best)) then
    best, most, missing = producer_id, can, lacks
  end
end
if not best then
  return {'ok', 0, 0}
end

redis.call('ZADD', waits, integer(until_us), tenant)
redis.call('PEXPIRE', waits, integer(CONST.owner_waits_us / 500))
-- What the cohort's quota lacks once all is back that is on its way.
local function lacking_quota()
  local lacking = most - room.unused
  for _, member in ipairs(room.members) do
    lacking = lacking - math.min(freed[member.name], math.max(0, member.leased - member.guaranteed))
  end
  return lacking
end
local ended, ended_bytes = 0, 0
for _, phase in ipairs({'memory', 'quota'}) do
  for _, lease in ipairs(candidates) do
    local is_needed
    if phase == 'memory' then
      is_needed = missing > 0 and lease.producer_id == best
    else
      is_needed = lacking_quota() > 0
    end
    if is_needed and RIGHTFUL[lease.state] and left[lease.tenant] > 0 then
      missing, left[lease.tenant] = missing - lease.bytes, left[lease.tenant] - lease.bytes
      freed[lease.tenant] = freed[lease.tenant] + lease.bytes
      ended, ended_bytes = ended + 1, ended_bytes + lease.bytes
      step(lease, EVENT.revoke, 'borrowed')
      save(lease)
    end
  end
end
return {'ok', ended, ended_bytes}
