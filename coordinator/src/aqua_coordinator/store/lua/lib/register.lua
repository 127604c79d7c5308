-- Makes functions of Redis of the scripts.
--
-- Every script but the one that opens the books finds them open, and one that may write finds their
-- clock going on.

local function register(name, flags, script)
  local reads_only = flags[1] == 'no-writes'
  local callback = function(keys, args)
    if not begin() then
      return {'no_books'}
    end
    if reads_only then
      return script(keys, args)
    end
    if stood_still then
      go_on()
    end
    local answer = script(keys, args)
    settle()
    return answer
  end
  if name == 'create_books' then
    callback = script
  end
  redis.register_function({
    function_name = 'LIBRARY_NAME_' .. name, callback = callback, flags = flags,
  })
end
