-- A page of the booked leases, by producer and then in the order of their grants; or one lease,
-- booked or ended.
--
-- ARGV[1]  cursor: `producer@epoch` to go on with this producer after this epoch; '' to start
-- ARGV[2]  limit: how many at most
-- ARGV[3]  lease_id: only this one, or ''
-- ARGV[4]  state: only in this, or ''
-- ARGV[5]  producer_id: only of this one, or ''
-- ARGV[6]  consumer_id: only of this one, or ''
-- ARGV[7]  as_tenant: only what this tenant may see; '' for all
-- Calls    lease_of, lease_row, is_visible
-- Result   {'ok', rows, cursor}: see lease_row; where to go on, '' at the end
--
-- A filter may leave a page short, or empty, with more to come: the scan is bounded, not the page.
-- @flags no-writes

local rows, limit, scanned = {}, tonumber(ARGV[2]), 0
if ARGV[3] ~= '' then
  local lease = lease_of(ARGV[3])
  return {'ok', lease and is_visible(lease.tenant, ARGV[7]) and {lease_row(lease)} or {}, ''}
end

local function wanted(lease)
  return (ARGV[4] == '' or lease.state == ARGV[4])
    and (ARGV[6] == '' or lease.consumer_id == ARGV[6])
    and is_visible(lease.tenant, ARGV[7])
end

local producer_id, after = string.match(ARGV[1], '^(.+)@(.+)$')
if producer_id then
  after = '(' .. after
else
  producer_id = ARGV[5] ~= '' and ARGV[5]
    or redis.call('ZRANGEBYLEX', KEY.producers, '-', '+', 'LIMIT', 0, 1)[1]
  after = '-inf'
end
while producer_id do
  local names = redis.call('ZRANGEBYSCORE', KEY.producer_leases .. producer_id, after, '+inf',
    'WITHSCORES', 'LIMIT', 0, CONST.max_scan - scanned)
  for index = 1, #names, 2 do
    local lease = lease_of(names[index])
    if lease and wanted(lease) then
      rows[#rows + 1] = lease_row(lease)
    end
    scanned = scanned + 1
    if #rows == limit or scanned == CONST.max_scan then
      return {'ok', rows, producer_id .. '@' .. names[index + 1]}
    end
  end
  scanned = scanned + 1
  if ARGV[5] ~= '' then
    break
  end
  if scanned >= CONST.max_scan then
    return {'ok', rows, producer_id .. '@+inf'}
  end
  producer_id = redis.call('ZRANGEBYLEX', KEY.producers, '(' .. producer_id, '+', 'LIMIT', 0, 1)[1]
  after = '-inf'
end
return {'ok', rows, ''}
