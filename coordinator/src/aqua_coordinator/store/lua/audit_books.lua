-- Check every rule that the books must keep; nothing is changed.
--
-- Calls    lease_of, offer_of
-- Result   {'ok', faults}: sentences, none when the books agree with themselves
--
-- For tests, benchmarks and operators in doubt: it reads everything, and Redis waits meanwhile.
-- @flags no-writes

local faults = {}
local function fault(...)
  faults[#faults + 1] = table.concat({...}, ' ')
end

local counts, offered_by, rightful = {}, {}, 0
local function check_lease(lease_id, producer_id)
  local lease = lease_of(lease_id)
  if not lease then
    fault(producer_id, 'books', lease_id, 'which has no record')
    return 0
  end
  if lease.producer_id ~= producer_id then
    fault(producer_id, 'books', lease_id, 'of', lease.producer_id)
  end
  if not BOOKED[lease.state] then
    fault(lease_id, 'is', lease.state, 'and still booked')
  elseif lease.state ~= CONST.initial_state then
    counts[lease.state] = (counts[lease.state] or 0) + 1
  end
  if lease.bytes <= 0 then
    fault(lease_id, 'is', lease.state, 'and books nothing')
  end
  rightful = rightful + (RIGHTFUL[lease.state] and 1 or 0)
  if (redis.call('ZSCORE', KEY.deadlines, lease_id) and true)
      ~= (RIGHTFUL[lease.state] or false) then
    fault(lease_id, 'is', lease.state, 'and its deadline disagrees')
  end
  local of_consumer = redis.call('ZSCORE', KEY.consumer_leases .. lease.consumer_id, lease_id)
  if tonumber(of_consumer or 0) ~= lease.bytes then
    fault(lease_id, 'is', lease.state, 'and', lease.consumer_id, 'disagrees')
  end
  if lease.epoch < lease.granted_epoch or lease.granted_epoch > math.max(epoch, now_us) then
    fault(lease_id, 'has an epoch that was never issued')
  end
  if redis.call('PTTL', KEY.lease .. lease_id) ~= -1 then
    fault(lease_id, 'is', lease.state, 'and its record will vanish')
  end
  return lease.bytes
end

for _, producer_id in ipairs(redis.call('ZRANGE', KEY.producers, 0, -1)) do
  local offer = offer_of(producer_id)
  local leased = 0
  for _, lease_id in ipairs(redis.call('ZRANGE', KEY.producer_leases .. producer_id, 0, -1)) do
    leased = leased + check_lease(lease_id, producer_id)
  end
  if not offer.exists then
    fault(producer_id, 'is listed and has no record')
  else
    local free = offer.offered - offer.leased
    if leased ~= offer.leased then
      fault(producer_id, 'has', leased, 'leased, but books', offer.leased)
    end
    if free < 0 then
      fault(producer_id, 'has', offer.leased, 'leased of', offer.offered)
    end
    local listed = tonumber(redis.call('ZSCORE', KEY.free .. offer.domain, producer_id) or 0)
    if listed ~= (offer.grantable and free or 0) then
      fault(producer_id, 'has', free, 'free, but lists', listed)
    end
    local waiting = redis.call('SISMEMBER', KEY.unconfirmed .. offer.domain, producer_id) == 1
    if waiting == offer.grantable then
      fault(producer_id, 'is both, or neither, grantable and unconfirmed')
    end
    if not redis.call('ZSCORE', KEY.producers_seen, producer_id) then
      fault(producer_id, 'will never be missed')
    end
    offered_by[offer.domain] = (offered_by[offer.domain] or 0) + 1
  end
end
for domain in pairs(offered_by) do
  for _, producer_id in ipairs(redis.call('ZRANGE', KEY.free .. domain, 0, -1)) do
    if not redis.call('ZSCORE', KEY.producers, producer_id) then
      fault(producer_id, 'lends in', domain, 'and is not in the books')
    end
  end
end
for _, consumer_id in ipairs(redis.call('ZRANGE', KEY.consumers, 0, -1)) do
  local held, leased = redis.call('ZRANGE', KEY.consumer_leases .. consumer_id, 0, -1,
    'WITHSCORES'), 0
  for index = 2, #held, 2 do
    leased = leased + tonumber(held[index])
  end
  local kept = tonumber(redis.call('HGET', KEY.consumer .. consumer_id, 'leased_bytes') or 0)
  if kept ~= leased then
    fault(consumer_id, 'has', leased, 'leased, but its record says', kept)
  end
end
local recorded = redis.call('HGETALL', KEY.lease_counts)
for index = 1, #recorded, 2 do
  local state = recorded[index]
  if tonumber(recorded[index + 1]) ~= (counts[state] or 0) then
    fault(counts[state] or 0, 'leases are', state, 'but counted as', recorded[index + 1])
  end
end
if redis.call('ZCARD', KEY.deadlines) ~= rightful then
  fault(redis.call('ZCARD', KEY.deadlines), 'deadlines for', rightful, 'leases')
end
return {'ok', faults}
