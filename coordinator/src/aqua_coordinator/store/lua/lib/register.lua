-- Makes a function of Redis of each script. Every script but the one that opens the books finds
-- them open, and every one that may write finds their clock going on.

local function register(name, flags, script)
  local reads_only = flags[1] == 'no-writes'
  local callback = script
  if name ~= 'create_books' then
    callback = function(keys, args)
      if not begin() then
        return {'no_books'}
      end
      if stood_still and not reads_only then
        go_on()
      end
      return script(keys, args)
    end
  end
  redis.register_function({function_name = 'LIBRARY_NAME_' .. name, callback = callback, flags = flags})
end
