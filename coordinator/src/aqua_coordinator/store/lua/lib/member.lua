-- Order of a member's reports: by incarnation, then by revision.

-- The refusal, or nil. A report may be repeated word for word; anything else under a revision
-- that has been booked is older knowledge than the books have.
local function why_stale(known, name, incarnation, revision, fingerprint)
  if not known.incarnation then
    return nil
  end
  if known.incarnation == incarnation then
    if revision < known.revision
        or (revision == known.revision and fingerprint ~= known.fingerprint) then
      return refuse('stale_revision', 'the books already hold a newer report of ' .. name,
        'revision', integer(revision), 'booked_revision', integer(known.revision))
    end
  elseif string.find(' ' .. known.retired .. ' ', ' ' .. incarnation .. ' ', 1, true) then
    return refuse('stale_revision', 'a newer process has taken the place of this one',
      'member', name, 'incarnation', incarnation)
  end
  return nil
end

local function member_of(key)
  local field = redis.call('HMGET', key, 'incarnation', 'revision', 'fingerprint', 'retired',
    'domain', 'slab_bytes')
  return {
    incarnation = field[1], revision = tonumber(field[2] or 0), fingerprint = field[3],
    retired = field[4] or '', domain = field[5], slab_bytes = tonumber(field[6] or 0),
  }
end

-- The lives that this member has left behind, latest first, a bounded number of them.
local function retire(known)
  local names = {known.incarnation}
  for name in string.gmatch(known.retired, '%S+') do
    if #names < CONST.max_retired_incarnations then
      names[#names + 1] = name
    end
  end
  return table.concat(names, ' ')
end

-- {name, silent_us, field, ...} of members in the order of their names: a page as ARGV says, which
-- is cursor ('' from the start), limit, and '' or the name of the only one.
local function member_rows(argv, index, seen, prefix, ...)
  local names = {argv[3]}
  if argv[3] == '' then
    names = redis.call('ZRANGEBYLEX', index, argv[1] == '' and '-' or '(' .. argv[1], '+',
      'LIMIT', 0, tonumber(argv[2]))
  end
  local rows = {}
  for _, name in ipairs(names) do
    local seen_us = redis.call('ZSCORE', seen, name)
    if seen_us then
      local row = redis.call('HMGET', prefix .. name, ...)
      table.insert(row, 1, clock_us - tonumber(seen_us))
      table.insert(row, 1, name)
      rows[#rows + 1] = row
    end
  end
  return rows
end
