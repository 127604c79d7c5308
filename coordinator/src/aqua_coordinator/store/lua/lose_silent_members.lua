-- One step of the sweep: members that have said nothing for too long leave the books.
--
-- ARGV[1]  silent_s: silence allowed, in microseconds of the books' clock
-- ARGV[2]  limit: how many leases and members at most
-- Calls    integer, leases_on, step, save, settle, forget_producer, offer_of, forget_consumer
-- Result   {'ok', steps}: leases and members handled; as many as allowed means there may be more
--
-- A lost producer's leases are LOST with it. A lost consumer's leases live on until they expire:
-- it may still be using them, and it is the producer who sees it die.

local horizon = integer(clock_us - tonumber(ARGV[1]))
local allowed, steps, gone = tonumber(ARGV[2]), 0, {}
for _, producer_id in ipairs(redis.call('ZRANGEBYSCORE', KEY.producers_seen, '-inf', horizon,
    'LIMIT', 0, allowed)) do
  for _, lease in ipairs(leases_on(KEY.producer_leases, 'producer_id', producer_id, false,
      allowed - steps)) do
    step(lease, EVENT.producer_lost, 'producer_lost')
    save(lease)
    steps = steps + 1
  end
  if steps >= allowed then
    break
  end
  gone[#gone + 1] = producer_id
  steps = steps + 1
end
settle()
for _, producer_id in ipairs(gone) do
  forget_producer(producer_id, offer_of(producer_id).domain)
end
for _, consumer_id in ipairs(redis.call('ZRANGEBYSCORE', KEY.consumers_seen, '-inf', horizon,
    'LIMIT', 0, allowed - steps)) do
  forget_consumer(consumer_id)
  steps = steps + 1
end
return {'ok', steps}
