"""The console: what a person sees of the cluster at `/`.

- `snapshot`: the books at one moment, as far as a caller may see them.
- `reasons`: why a member has what it has, and what happened, in plain sentences.
- `batch_watch`: what a batch service says of its batches, where there is one.
- `markup`, `batch_markup`: HTML and SVG; nothing else writes any, and they escape everything.
- `views`: the answers, made once for all who look at the same time.
- `static`: the page, its style and script, and two vendored libraries; nothing comes from outside.

The page itself says nothing of the cluster, so it needs no token; what it then asks for under
`/v1/console` does. All of that is read from the books, or asked of the batch service, so any
coordinator of one Redis shows the same. A process keeps nothing but answers, for two seconds at
most.
"""
