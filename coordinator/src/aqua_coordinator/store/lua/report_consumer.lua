-- Book a consumer's full state; every lease it names is renewed.
--
-- ARGV[1]  report: a ConsumerReport as JSON, without nulls
-- ARGV[2]  as_tenant: whose the caller's token is, or ''
-- ARGV[3]  is_bound: 1 if it is bound to this member
-- Calls    member_of, why_stale, load_leases, lease_of, is_borne_out, refuse, whole, integer,
--          tenant_in, leases_on, attribute, save, retire, emit, step, prolong, terms_of, largest,
--          pairing_of, headroom, borrowed_by_others, why_not_join
-- Result   {'ok', books_id, available_bytes, ended}
--            ended {{lease_id, epoch, reason}, ...}: leases named in the report whose right is over
-- Refuses  stale_revision, protocol_violation, forbidden, quota_exceeded
--
-- A lease that is GRANTED is not prolonged: the time for attaching runs from the grant. A lease
-- that the books do not know may be one of lost books, whose producer has not reported yet, so it
-- is called ended only when the consumer has named it for a while.

local report = cjson.decode(ARGV[1])
local fingerprint = redis.sha1hex(ARGV[1])
local consumer_id = report.consumer_id
local key = KEY.consumer .. consumer_id
local known = member_of(key)

local tenant, refusal = tenant_in(known, consumer_id, ARGV[2] or '', ARGV[3])
refusal = refusal
  or why_stale(known, consumer_id, report.incarnation, report.revision, fingerprint)
  or why_not_join(known, consumer_id, tenant)
if refusal then
  return refusal
end
if tenant ~= '' and not known.incarnation then
  -- A name is its tenant's until all that was leased under it is back.
  for _, lease in ipairs(leases_on(KEY.consumer_leases, 'consumer_id', consumer_id)) do
    if lease.tenant ~= '' and lease.tenant ~= tenant then
      return refuse('forbidden', 'the name is that of a member of others', 'member', consumer_id)
    end
  end
end
local lease_ids = {}
for index, used in ipairs(report.leases) do
  lease_ids[index] = used.lease_id
end
load_leases(lease_ids)
for _, used in ipairs(report.leases) do
  local lease = lease_of(used.lease_id)
  if lease and lease.consumer_id ~= consumer_id and is_borne_out(lease) then
    return refuse('protocol_violation', 'the lease belongs to another consumer',
      'lease_id', used.lease_id)
  end
end

local leased = 0
for index, bytes in ipairs(redis.call('ZRANGE', KEY.consumer_leases .. consumer_id, 0, -1,
    'WITHSCORES')) do
  leased = leased + (index % 2 == 0 and whole(bytes) or 0)
end
local reborn = known.incarnation and known.incarnation ~= report.incarnation
redis.call('HSET', key,
  'incarnation', report.incarnation, 'revision', integer(report.revision),
  'fingerprint', fingerprint,
  'retired', reborn and retire(known) or known.retired,
  'node', report.node, 'domain', report.domain, 'gpu_uuid', report.gpu_uuid,
  'model', report.model or '', 'wanted_bytes', integer(report.wanted_bytes),
  'spilled_bytes', integer(report.spilled_bytes), 'leased_bytes', integer(leased))
redis.call('ZADD', KEY.consumers_seen, integer(clock_us), consumer_id)
redis.call('ZADD', KEY.consumers, 0, consumer_id)
if tenant ~= '' then
  redis.call('HSET', key, 'tenant', tenant)
  redis.call('ZADD', KEY.consumers_of .. tenant, 0, consumer_id)
end
if not known.incarnation then
  emit(KIND.consumer_joined, nil, consumer_id, nil, nil, nil, tenant)
end

-- Leases that the books do not know, and when the consumer named each of them first: one record
-- with a bounded number of them, those of this report.
local function claims_in(text)
  local claims = {}
  for lease_id, since_us in string.gmatch(text or '', '(%S+) (%d+)') do
    claims[lease_id] = whole(since_us)
  end
  return claims
end

local ended, kept, claims = {}, {}, nil
local patience_us = math.max(CONST.claim_patience_us, CONST.heartbeats_missed * spread_us)
for _, used in ipairs(report.leases) do
  local lease = lease_of(used.lease_id)
  if not lease then
    claims = claims or claims_in(redis.call('GET', KEY.claims .. consumer_id))
    local since_us = claims[used.lease_id] or clock_us
    if clock_us - since_us > patience_us then
      ended[#ended + 1] = {used.lease_id, used.epoch, 'unknown'}
    end
    if #kept < CONST.max_claims then
      kept[#kept + 1] = used.lease_id .. ' ' .. integer(since_us)
    end
  elseif not RIGHTFUL[lease.state] or used.epoch ~= lease.epoch then
    local reason = RIGHTFUL[lease.state] and 'stale_epoch' or lease.reason
    ended[#ended + 1] = {used.lease_id, lease.epoch, reason}
  else
    step(lease, EVENT.renew)
    attribute(lease, tenant)
    save(lease)
    if lease.state ~= STATE.granted then
      prolong(lease)
    end
  end
end

if claims then
  redis.call('SET', KEY.claims .. consumer_id, table.concat(kept, '\n'),
    'PX', integer(patience_us / 500))
end

local terms = terms_of({}, known.avoided)
terms.takes_suspected = true
local _, available = largest(report.domain, pairing_of(consumer_id), terms)
local room = headroom(tenant, consumer_id, integer(leased), 0)
if room then
  -- What others have borrowed of its quota comes back when it asks.
  local lent = math.min(room.owned, borrowed_by_others(room, math.min(room.owned, 1)))
  available = math.max(math.min(available, room.bytes), lent)
end
return {'ok', books_id, available, ended}
