-- Sorted sets that list leases and offers. A call gathers its changes and `settle` writes them: one
-- command for each list instead of one for each member, since what a command costs is its call.
-- A script that reads a list by a command of its own after changes to it calls `write_list` before.

local MAX_WORDS = 1000

local function note(key, member, score, growth)
  unwritten[key] = unwritten[key] or {}
  unwritten[key][member] = score
  growths[key] = (growths[key] or 0) + growth
end

local function enlist(key, member, score)
  note(key, member, score, 1)
end

local function strike(key, member)
  note(key, member, false, -1)
end

-- How many a list has, if members were new when they were enlisted, and there when struck.
local function size_of(key)
  return redis.call('ZCARD', key) + (growths[key] or 0)
end

-- The number that a member is listed under, or false.
local function score_of(key, member)
  local score = unwritten[key] and unwritten[key][member]
  if score == nil then
    score = redis.call('ZSCORE', key, member)
  end
  return score and tonumber(score)
end

local function write_list(key)
  if not unwritten[key] then
    return
  end
  local added, struck = {}, {}
  for member, score in pairs(unwritten[key]) do
    if score then
      added[#added + 1] = integer(score)
      added[#added + 1] = member
    else
      struck[#struck + 1] = member
    end
  end
  for first = 1, #added, MAX_WORDS do
    redis.call('ZADD', key, unpack(added, first, math.min(first + MAX_WORDS - 1, #added)))
  end
  for first = 1, #struck, MAX_WORDS do
    redis.call('ZREM', key, unpack(struck, first, math.min(first + MAX_WORDS - 1, #struck)))
  end
  unwritten[key], growths[key] = nil, nil
end

local function write_lists()
  for key in pairs(unwritten) do
    write_list(key)
  end
end
