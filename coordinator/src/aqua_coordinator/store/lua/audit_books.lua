-- Look at a page of the books: put right what follows from records, set aside what cannot be right.
--
-- ARGV[1]  cursor: where the last page ended; '' from the start
-- ARGV[2]  limit: how many members and leases, or somewhat more with the leases of the last member
-- Calls    score_of, set_aside, strike, set_deadline, enlist, write_lease, counts_of, offer_of,
--          drop_reclaim, leases_on, member_of, list_lease, integer, write_list, load_leases,
--          lease_of
-- Result   {'ok', faults, cursor}: sentences; where to go on, '' at the end
--
-- First reclaims and producers, then consumers, then deadlines. A producer whose sums cannot be
-- right lends nothing until its next report, which makes them anew.

local domains, limit, seen = {}, tonumber(ARGV[2]), 0
local phase, after = string.match(ARGV[1], '^(%l) (.*)$')
phase, after = phase or 'p', after or ''

local function check_lease(lease)
  local deadline = score_of(KEY.deadlines, lease.lease_id)
  if (deadline and true or false) ~= (RIGHTFUL[lease.state] or false) then
    set_aside(KEY.deadlines, lease.lease_id .. ' is ' .. lease.state .. ', its deadline disagrees')
    if deadline then
      strike(KEY.deadlines, lease.lease_id)
    else
      set_deadline(lease, clock_us + lease.ttl_us)
    end
  end
  local list = KEY.consumer_leases .. lease.consumer_id
  if score_of(list, lease.lease_id) ~= lease.bytes then
    set_aside(list, lease.lease_id .. ' disagrees')
    enlist(list, lease.lease_id, lease.bytes)
  end
  if redis.call('PTTL', KEY.lease .. lease.lease_id) ~= -1 then
    set_aside(KEY.lease .. lease.lease_id, 'would have vanished')
    write_lease(lease)
  end
end

local function check_sums(producer_id, offer, leases)
  local leased, counts = offer.unproven, {}
  for _, lease in ipairs(leases) do
    leased = leased + lease.bytes
    counts[lease.state] = (counts[lease.state] or 0) + 1
  end
  counts[CONST.initial_state] = nil
  local agrees = leased == offer.leased
  for state in pairs(BOOKED) do
    agrees = agrees and (counts[state] or 0) == (counts_of(offer)[state] or 0)
  end
  local free = offer.grantable and offer.offered - offer.leased or 0
  local listed = score_of(KEY.free .. offer.domain, producer_id) or 0
  local waits = redis.call('SISMEMBER', KEY.unconfirmed .. offer.domain, producer_id) == 1
  if agrees and listed == free and waits ~= offer.grantable then
    return
  end
  if offer.grantable or not waits or listed ~= 0 then
    set_aside(KEY.producer .. producer_id, table.concat({'has leased', leased, 'not', offer.leased,
      'or lists', listed, 'free, not', free}, ' '))
    offer.grantable, offer.changed = false, true
    redis.call('HSET', KEY.producer .. producer_id, 'grantable', '0')
    redis.call('SADD', KEY.unconfirmed .. offer.domain, producer_id)
  end
end

-- What waits or lends in a domain and is no producer of it.
local function check_domain(domain)
  if domains[domain] then
    return
  end
  domains[domain] = true
  local free, unconfirmed = KEY.free .. domain, KEY.unconfirmed .. domain
  for _, producer_id in ipairs(redis.call('ZREVRANGE', free, 0, limit - 1)) do
    if offer_of(producer_id).domain ~= domain then
      set_aside(free, producer_id .. ' is listed, and no producer')
      strike(free, producer_id)
    end
  end
  for _, producer_id in ipairs(redis.call('SRANDMEMBER', unconfirmed, limit)) do
    if offer_of(producer_id).domain ~= domain then
      set_aside(unconfirmed, producer_id .. ' is listed, and no producer')
      redis.call('SREM', unconfirmed, producer_id)
    end
  end
end

local function check_open_reclaims(producer_id)
  local open = redis.call('ZRANGE', KEY.producer_reclaims .. producer_id, 0, -1, 'WITHSCORES')
  for index = 1, #open, 2 do
    if redis.call('HGET', KEY.reclaim .. open[index], 'producer_id') ~= producer_id then
      drop_reclaim(open[index], producer_id)
    elseif not redis.call('ZSCORE', KEY.reclaims, open[index]) then
      set_aside(KEY.reclaims, open[index] .. ' is not listed')
      redis.call('ZADD', KEY.reclaims, open[index + 1], open[index])
    end
  end
end

local function check_producer(producer_id)
  local offer = offer_of(producer_id)
  local leases = leases_on(KEY.producer_leases, 'producer_id', producer_id)
  check_open_reclaims(producer_id)
  for _, lease in ipairs(leases) do
    check_lease(lease)
  end
  if offer.exists then
    check_sums(producer_id, offer, leases)
    check_domain(offer.domain)
  end
  return #leases
end

local function check_consumer(consumer_id)
  member_of(KEY.consumer .. consumer_id)
  local leases = leases_on(KEY.consumer_leases, 'consumer_id', consumer_id)
  for _, lease in ipairs(leases) do
    if not score_of(KEY.producer_leases .. lease.producer_id, lease.lease_id) then
      set_aside(KEY.producer_leases .. lease.producer_id, lease.lease_id .. ' is not listed')
      list_lease(lease)
    end
  end
  return #leases
end

-- Members in the order of their names; the last one, or nil when all have been seen.
local function check_members(index, last_seen, check)
  for _, name in ipairs(redis.call('ZRANGEBYLEX', index, after == '' and '-' or '(' .. after, '+',
      'LIMIT', 0, limit)) do
    if not redis.call('ZSCORE', last_seen, name) then
      set_aside(last_seen, name .. ' would never be missed')
      redis.call('ZADD', last_seen, integer(clock_us), name)
    end
    seen, after = seen + 1 + check(name), name
    if seen >= limit then
      return after
    end
  end
  return nil
end

local function go_on_with(next_phase, position)
  return {'ok', faults, next_phase .. ' ' .. position}
end

local function check_reclaims()
  for _, reclaim_id in ipairs(redis.call('ZRANGE', KEY.reclaims, 0, limit - 1)) do
    if not redis.call('HGET', KEY.reclaim .. reclaim_id, 'producer_id')
        and not redis.call('ZSCORE', KEY.ended_reclaims, reclaim_id) then
      set_aside(KEY.reclaims, reclaim_id .. ' has no record')
      redis.call('ZREM', KEY.reclaims, reclaim_id)
    end
  end
end

if phase == 'p' then
  if after == '' then
    -- Reading them is enough: what is of the wrong type is set aside.
    redis.call('XLEN', KEY.events)
    redis.call('XLEN', KEY.quarantine)
    redis.call('HLEN', KEY.placements)
    redis.call('HLEN', KEY.placement_reasons)
    redis.call('HLEN', KEY.profiles)
    redis.call('ZCARD', KEY.ended_reclaims)
    check_reclaims()
  end
  local last = check_members(KEY.producers, KEY.producers_seen, check_producer)
  if last then
    return go_on_with('p', last)
  end
  phase, after = 'c', ''
end
if phase == 'c' then
  local last = check_members(KEY.consumers, KEY.consumers_seen, check_consumer)
  if last then
    return go_on_with('c', last)
  end
  phase, after = 'd', ''
end
local first = tonumber(after) or 0
write_list(KEY.deadlines)
local lease_ids = redis.call('ZRANGE', KEY.deadlines, first, first + limit - 1)
load_leases(lease_ids)
for _, lease_id in ipairs(lease_ids) do
  local lease = lease_of(lease_id)
  if not lease or not RIGHTFUL[lease.state] then
    set_aside(KEY.deadlines, lease_id .. ' has a deadline, and no right')
    strike(KEY.deadlines, lease_id)
  end
end
return #lease_ids == limit and go_on_with('d', first + limit) or {'ok', faults, ''}
