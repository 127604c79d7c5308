"""The console: what a person sees of the cluster at `/`.

- `snapshot`: the books at one moment, as far as a caller may see them.
- `reasons`: why a member has what it has, and what happened, in plain sentences.
- `markup`: HTML and SVG of both; the only place that writes any, and it escapes everything.
- `views`: the answers, made once for all who look at the same time.
- `static`: the page, its style and script, and two vendored libraries; nothing comes from outside.

The page itself says nothing of the cluster, so it needs no token; what it then asks for under
`/v1/console` does. All of that is read from the books, so any coordinator of one Redis shows the
same. A process keeps nothing but answers, for a second at most.
"""
