-- Makes functions of Redis of the scripts.
--
-- Every script but the one that opens the books finds them open. `run_several` runs scripts one
-- after the other in one call, each over what those before it have left: they share the reading of
-- books and producers, and the writing of lists. A script that fails there fails alone, which is
-- sound, since scripts check before they write.

local scripts = {}

local function register_function(name, flags, callback)
  redis.register_function({
    function_name = 'LIBRARY_NAME_' .. name, callback = callback, flags = flags,
  })
end

-- Within open books, whose changes are written at the end.
local function writing(script)
  return function(keys, args)
    local refusal = why_not_begin(false)
    if refusal then
      return refusal
    end
    local answer = script(keys, args)
    settle()
    return answer
  end
end

local function register(name, flags, script)
  scripts[name] = script
  local callback = writing(script)
  if name == 'create_books' then
    callback = function(keys, args)
      reading = false
      return script(keys, args)
    end
  elseif flags[1] == 'no-writes' then
    callback = function(keys, args)
      return why_not_begin(true) or script(keys, args)
    end
  end
  register_function(name, flags, callback)
end

-- ARGV is a script's name, how many arguments it has, and these; repeated.
register_function('run_several', {}, writing(function(keys, args)
  local answers, at = {}, 1
  while at < #args do
    local last = at + 1 + tonumber(args[at + 1])
    local sound, answer = pcall(scripts[args[at]], keys, {unpack(args, at + 2, last)})
    local fault = type(answer) == 'table' and answer.err or 'ERR ' .. tostring(answer)
    answers[#answers + 1] = sound and answer or redis.error_reply(fault)
    at = last + 1
  end
  return {'ok', answers}
end))
