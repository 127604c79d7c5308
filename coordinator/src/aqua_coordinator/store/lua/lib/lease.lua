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
  -- A consumer that has no record yet, or no more, finds its sum when it reports.
  for consumer_id, change in pairs(of_consumers) do
    if change ~= 0 and redis.call('HEXISTS', KEY.consumer .. consumer_id, 'leased_bytes') == 1 then
      redis.call('HINCRBY', KEY.consumer .. consumer_id, 'leased_bytes', integer(change))
    end
  end
  of_consumers = {}
  write_lists()
  write_epoch()
end

-- A record is one string: a hash would cost twice as much to write, by its words.
local RECORD = '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n'
  .. '([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)$'

local function lease_of(lease_id)
  local lease = leases[lease_id]
  if lease == nil then
    local record = redis.call('GET', KEY.lease .. lease_id)
    lease = false
    if record then
      local state, epoch_text, granted_epoch, producer_id, consumer_id, bytes, ttl_us, granted_us,
        reason = string.match(record, RECORD)
      lease = {
        lease_id = lease_id, state = state, epoch = tonumber(epoch_text),
        granted_epoch = tonumber(granted_epoch), producer_id = producer_id,
        consumer_id = consumer_id, bytes = tonumber(bytes), ttl_us = tonumber(ttl_us),
        granted_us = tonumber(granted_us), reason = reason,
      }
    end
    leases[lease_id] = lease
  end
  return lease
end

-- Write the record; that of an ended lease expires.
local function write_lease(lease)
  local record = table.concat({
    lease.state, integer(lease.epoch), integer(lease.granted_epoch), lease.producer_id,
    lease.consumer_id, integer(lease.bytes), integer(lease.ttl_us), integer(lease.granted_us),
    lease.reason,
  }, '\n')
  if BOOKED[lease.state] then
    redis.call('SET', KEY.lease .. lease.lease_id, record)
  else
    redis.call('SET', KEY.lease .. lease.lease_id, record, 'PX', CONST.ended_retention_ms)
  end
end

-- A lease that the books did not have; `save` writes it.
local function open_lease(lease)
  lease.granted_us, lease.bytes, lease.reason = clock_us, 0, ''
  lease.touched = true
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
  of_consumers[lease.consumer_id] = (of_consumers[lease.consumer_id] or 0) + bytes - lease.bytes
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

-- For its time to live from now on; in a large cluster, for as long as its holder may be silent.
local function prolong(lease)
  set_deadline(lease, clock_us + math.max(lease.ttl_us, CONST.heartbeats_missed * spread_us))
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
    -- rests; every other end is final, and a new epoch fences what still acts on the old one.
    -- It has to be new for this lease only, so the books' counter is left alone.
    if after ~= STATE.lost then
      lease.epoch = math.max(lease.epoch + 1, now_us)
    end
  elseif RIGHTFUL[after] and not RIGHTFUL[before] then
    lease.reason = ''
    prolong(lease)
  end
  if BOOKED[before] and not BOOKED[after] then
    book(lease, 0)
    strike(KEY.producer_leases .. lease.producer_id, lease.lease_id)
    strike(KEY.consumer_leases .. lease.consumer_id, lease.lease_id)
  elseif BOOKED[after] and not BOOKED[before] then
    list_lease(lease)
  end
  return true
end

local function save(lease)
  if not lease.touched then
    return
  end
  write_lease(lease)
  emit(KIND.lease_changed, lease.producer_id, lease.consumer_id, lease.lease_id, lease.state,
    lease.bytes)
  lease.touched = false
end

-- lease_id, epoch, state, producer_id, consumer_id, bytes, expires_in_us: a LeaseView.
local function lease_row(lease)
  local deadline_us = RIGHTFUL[lease.state] and score_of(KEY.deadlines, lease.lease_id)
  local expires_in_us = deadline_us and math.max(0, deadline_us - clock_us) or 0
  return {lease.lease_id, lease.epoch, lease.state, lease.producer_id, lease.consumer_id,
    lease.bytes, expires_in_us}
end
