-- Leases and the offers they are booked on. `step` is the only place that changes a state, and
-- it asks the table; `book` is the only place that moves bytes; `settle` ends every call that
-- may write: it writes what happened to producers and lists, once for each, and the epochs issued.

local NEXT = LEASE_TRANSITIONS
local BOOKED = LEASE_BOOKED_STATES
-- States that may be renewed: the holder has a right that a clock can end.
local RIGHTFUL = LEASE_RIGHTFUL_STATES

local function offer_of(producer_id)
  local offer = offers[producer_id]
  if not offer then
    local field = redis.call('HMGET', KEY.producer .. producer_id,
      'offered_bytes', 'leased_bytes', 'domain', 'grantable', 'slab_bytes', 'endpoint',
      'transport', 'incarnation')
    offer = {
      exists = field[1] and true,
      offered = tonumber(field[1] or 0), leased = tonumber(field[2] or 0),
      domain = field[3], grantable = field[4] == '1', slab_bytes = tonumber(field[5] or 0),
      endpoint = field[6], transport = field[7], incarnation = field[8],
    }
    offers[producer_id] = offer
  end
  return offer
end

local function list_offer(producer_id, offer)
  local free = offer.offered - offer.leased
  if free > 0 and offer.grantable then
    enlist(KEY.free .. offer.domain, producer_id, free)
  else
    strike(KEY.free .. offer.domain, producer_id)
  end
end

local function settle()
  for producer_id, offer in pairs(offers) do
    if offer.changed then
      redis.call('HSET', KEY.producer .. producer_id,
        'offered_bytes', integer(offer.offered), 'leased_bytes', integer(offer.leased))
      list_offer(producer_id, offer)
      offer.changed = false
    end
  end
  write_lists()
  write_epoch()
end

local function lease_of(lease_id)
  local lease = leases[lease_id]
  if lease == nil then
    local field = redis.call('HMGET', KEY.lease .. lease_id, 'state', 'epoch', 'granted_epoch',
      'producer_id', 'consumer_id', 'bytes', 'ttl_us', 'reason', 'granted_us')
    lease = field[1] and {
      lease_id = lease_id, state = field[1], epoch = tonumber(field[2]),
      granted_epoch = tonumber(field[3]), producer_id = field[4], consumer_id = field[5],
      bytes = tonumber(field[6]), ttl_us = tonumber(field[7]), reason = field[8],
      granted_us = tonumber(field[9]),
    } or false
    leases[lease_id] = lease
  end
  return lease
end

-- A lease that the books did not have; `save` writes it.
local function open_lease(lease)
  lease.granted_us, lease.bytes, lease.reason = clock_us, 0, ''
  lease.fresh, lease.touched = true, true
  leases[lease.lease_id] = lease
  return lease
end

local function book(lease, bytes)
  if bytes == lease.bytes then
    return
  end
  local offer = offer_of(lease.producer_id)
  offer.leased = offer.leased + bytes - lease.bytes
  offer.changed = true
  lease.bytes = bytes
  lease.touched = true
  if bytes > 0 then
    enlist(KEY.consumer_leases .. lease.consumer_id, lease.lease_id, bytes)
  end
end

-- Put the lease where its producer and listings find it.
local function list_lease(lease)
  enlist(KEY.producer_leases .. lease.producer_id, lease.lease_id, lease.granted_epoch)
end

-- Every lease starts in the initial state, and many end there: those are what the others leave.
local function count(state, change)
  if BOOKED[state] and state ~= CONST.initial_state then
    redis.call('HINCRBY', KEY.lease_counts, state, change)
  end
end

local function set_deadline(lease, deadline_us)
  enlist(KEY.deadlines, lease.lease_id, deadline_us)
end

-- Take `event`; false when the table refuses it. `reason` is told to members that still name the
-- lease, and matters only where its right ends.
local function step(lease, event, reason)
  local before = lease.state
  local after = NEXT[before .. ' ' .. event]
  if not after then
    return false
  end
  if after == before then
    return true
  end
  lease.state = after
  lease.touched = true
  count(before, -1)
  count(after, 1)
  if RIGHTFUL[before] and not RIGHTFUL[after] then
    lease.reason = reason
    strike(KEY.deadlines, lease.lease_id)
    -- A lost producer may come back with its slabs and its lease (ADOPT), so that right only
    -- rests; every other end is final, and a new epoch fences whoever still acts on the old one.
    -- It has to be new for this lease only, so the books' counter is left alone.
    if after ~= STATE.lost then
      lease.epoch = math.max(lease.epoch + 1, now_us)
    end
  elseif RIGHTFUL[after] and not RIGHTFUL[before] then
    lease.reason = ''
    set_deadline(lease, clock_us + lease.ttl_us)
  end
  if BOOKED[before] and not BOOKED[after] then
    book(lease, 0)
    strike(KEY.producer_leases .. lease.producer_id, lease.lease_id)
    strike(KEY.consumer_leases .. lease.consumer_id, lease.lease_id)
  elseif BOOKED[after] and not BOOKED[before] then
    redis.call('PERSIST', KEY.lease .. lease.lease_id)
    list_lease(lease)
  end
  return true
end

local function save(lease)
  if not lease.touched then
    return
  end
  local key = KEY.lease .. lease.lease_id
  if lease.fresh then
    redis.call('HSET', key, 'state', lease.state, 'epoch', integer(lease.epoch),
      'bytes', integer(lease.bytes), 'reason', lease.reason,
      'granted_epoch', integer(lease.granted_epoch), 'producer_id', lease.producer_id,
      'consumer_id', lease.consumer_id, 'ttl_us', integer(lease.ttl_us),
      'granted_us', integer(lease.granted_us))
  else
    redis.call('HSET', key, 'state', lease.state, 'epoch', integer(lease.epoch),
      'bytes', integer(lease.bytes), 'reason', lease.reason)
  end
  if not BOOKED[lease.state] then
    redis.call('PEXPIRE', key, CONST.ended_retention_ms)
  end
  emit(KIND.lease_changed, lease.producer_id, lease.consumer_id, lease.lease_id, lease.state,
    lease.bytes)
  lease.touched, lease.fresh = false, false
end

-- lease_id, epoch, state, producer_id, consumer_id, bytes, expires_in_us: a LeaseView.
local function lease_row(lease)
  local deadline_us = RIGHTFUL[lease.state] and score_of(KEY.deadlines, lease.lease_id)
  local expires_in_us = deadline_us and math.max(0, deadline_us - clock_us) or 0
  return {lease.lease_id, lease.epoch, lease.state, lease.producer_id, lease.consumer_id,
    lease.bytes, expires_in_us}
end
