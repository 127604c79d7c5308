-- Look at a page of the books: put right what follows from records, set aside what cannot be right.
--
-- ARGV[1]  cursor: where the last page ended; '' from the start
-- ARGV[2]  limit: how many members and leases, or somewhat more with the leases of the last member
-- Calls    score_of, set_aside, strike, set_deadline, enlist, write_lease, counts_of, offer_of,
--          drop_reclaim, leases_on, member_of, list_lease, integer, write_list, load_leases,
--          lease_of, count_for, write_tenants, tenant_of, set_leased, attribute, save, step
-- Result   {'ok', faults, cursor}: sentences; where to go on, '' at the end
--
-- First reclaims and producers, then consumers, tenants, deadlines, and last the records of leases,
-- which are looked for by name: one that every list has lost would be found by nothing else. A
-- producer whose sums cannot be right lends nothing until its next report, which makes them anew.

local domains, limit, seen = {}, tonumber(ARGV[2]), 0
local phase, after = string.match(ARGV[1], '^(%l) (.*)$')
phase, after = phase or 'p', after or ''

-- What a consumer has on lease for a tenant.
local function check_leased(tenant, consumer_id)
  local key, leased = KEY.tenant_leased .. tenant, 0
  for _, lease in ipairs(leases_on(KEY.consumer_leases, 'consumer_id', consumer_id)) do
    leased = leased + (lease.tenant == tenant and lease.bytes or 0)
  end
  local known = score_of(key, consumer_id) or 0
  if known ~= leased then
    set_aside(key, table.concat({consumer_id, 'has leased', leased, 'not', known}, ' '))
    count_for(tenant, consumer_id, leased - known)
    write_tenants()
  end
end

local function check_lease(lease)
  if lease.tenant ~= '' and not score_of(KEY.tenant_leased .. lease.tenant, lease.consumer_id) then
    check_leased(lease.tenant, lease.consumer_id)
  elseif lease.tenant ~= '' and tenant_of(lease.tenant).leased == 0 then
    -- The next phase goes by this hash.
    tenant_of(lease.tenant).leased = lease.bytes
    set_leased(lease.tenant, lease.bytes)
  end
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
  local tenant = member_of(KEY.consumer .. consumer_id).tenant
  local leases = leases_on(KEY.consumer_leases, 'consumer_id', consumer_id)
  for _, lease in ipairs(leases) do
    if not score_of(KEY.producer_leases .. lease.producer_id, lease.lease_id) then
      set_aside(KEY.producer_leases .. lease.producer_id, lease.lease_id .. ' is not listed')
      list_lease(lease)
    end
    attribute(lease, tenant)
    save(lease)
  end
  return #leases
end

-- A page of the consumers of a tenant; its sum, when they have all been seen, and strangers' names.
local function check_tenant(tenant, from)
  local key = KEY.tenant_leased .. tenant
  write_list(key)
  local names = redis.call('ZRANGE', key, from, from + limit - 1)
  for _, consumer_id in ipairs(names) do
    check_leased(tenant, consumer_id)
  end
  if #names == limit then
    return from + limit
  end
  write_list(key)
  local leased = 0
  for index, score in ipairs(redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')) do
    leased = leased + (index % 2 == 0 and tonumber(score) or 0)
  end
  if tenant_of(tenant).leased ~= leased then
    set_aside(KEY.tenants, table.concat({tenant, 'has leased', leased, 'not',
      tenant_of(tenant).leased}, ' '))
    tenant_of(tenant).leased = leased
    set_leased(tenant, leased)
  end
  return nil
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
    local record = redis.call('HMGET', KEY.reclaim .. reclaim_id, 'producer_id', 'done')
    if not redis.call('ZSCORE', KEY.ended_reclaims, reclaim_id) then
      if not record[1] then
        set_aside(KEY.reclaims, reclaim_id .. ' has no record')
        redis.call('ZREM', KEY.reclaims, reclaim_id)
      elseif record[2] == '1' then
        set_aside(KEY.ended_reclaims, reclaim_id .. ' is not listed')
        redis.call('ZADD', KEY.ended_reclaims, integer(now_us), reclaim_id)
      end
    end
  end
end

if phase == 'p' then
  if after == '' then
    -- Reading them is enough: what is of the wrong type is set aside.
    for _, stream in ipairs({KEY.events, KEY.quarantine, KEY.reclaim_history, KEY.samples}) do
      redis.call('XLEN', stream)
    end
    for _, hash in ipairs({KEY.placements, KEY.placement_reasons, KEY.profiles, KEY.quotas}) do
      redis.call('HLEN', hash)
    end
    redis.call('ZCARD', KEY.ended_reclaims)
    redis.call('ZCARD', KEY.placement_names)
    if has_quotas and redis.call('EXISTS', KEY.quotas) == 0 then
      -- Coordinators that have a file of quotas write them anew.
      set_aside(KEY.quotas, 'is lost')
      redis.call('HSET', KEYS[1], 'quotas', '')
    end
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
  phase, after = 't', ''
end
if phase == 't' then
  local names = redis.call('HKEYS', KEY.tenants)
  table.sort(names)
  local last, from = string.match(after, '^(%S*) ?(%d*)$')
  for _, name in ipairs(names) do
    if name > last or name == last and from ~= '' then
      local position = check_tenant(name, name == last and tonumber(from) or 0)
      return go_on_with('t', position and name .. ' ' .. position or name)
    end
  end
  phase, after = 'd', ''
end
if phase == 'd' then
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
  if #lease_ids == limit then
    return go_on_with('d', first + limit)
  end
  after = '0'
end
local page = redis.call('SCAN', after, 'MATCH', KEY.lease .. '*', 'COUNT', limit)
local lease_ids = {}
for index, name in ipairs(page[2]) do
  lease_ids[index] = string.sub(name, #KEY.lease + 1)
end
load_leases(lease_ids)
for _, lease_id in ipairs(lease_ids) do
  local lease = lease_of(lease_id)
  local list = lease and KEY.producer_leases .. lease.producer_id
  if lease and BOOKED[lease.state] and not score_of(list, lease_id) then
    set_aside(list, lease_id .. ' is not listed')
    list_lease(lease)
    if not redis.call('ZSCORE', KEY.producers, lease.producer_id) then
      step(lease, EVENT.producer_lost, 'producer_lost')
      save(lease)
    end
  end
end
return page[1] == '0' and {'ok', faults, ''} or go_on_with('r', page[1])
