{{/* What the schema cannot say: values that were renamed, and values that do not fit together. */}}

{{- define "aqua.checks" -}}
{{- range $old, $new := .Files.Get "files/renamed.yaml" | fromYaml -}}
{{- $here := $.Values -}}
{{- range $part := splitList "." $old -}}
{{- if and (kindIs "map" $here) (hasKey $here $part) }}{{ $here = index $here $part }}{{ else }}{{ $here = "aqua.absent" }}{{ end -}}
{{- end -}}
{{- if not (eq (toString $here) "aqua.absent") }}{{ fail (printf "%s is now %s" $old $new) }}{{ end -}}
{{- end -}}

{{- $redis := .Values.redis.external -}}
{{- $named := or $redis.urlSecret.name $redis.host $redis.sentinel.hosts -}}
{{- if and .Values.redis.bundled.enabled $named -}}
{{- fail "redis.external names a Redis and redis.bundled.enabled is true: set it to false" -}}
{{- end -}}
{{- if not (or .Values.redis.bundled.enabled $named) -}}
{{- fail "no Redis: set redis.external.host, .sentinel.hosts or .urlSecret.name, or redis.bundled.enabled" -}}
{{- end -}}
{{- if and $redis.host $redis.sentinel.hosts -}}
{{- fail "redis.external has a host and Sentinels: leave one out" -}}
{{- end -}}
{{- if and $redis.sentinel.hosts (not $redis.sentinel.service) -}}
{{- fail "redis.external.sentinel.service is required: the name that Sentinels know the master by" -}}
{{- end -}}
{{- if and $redis.urlSecret.name (or $redis.host $redis.sentinel.hosts) -}}
{{- fail "redis.external has urlSecret, which is the whole URL, and a host or Sentinels: leave one out" -}}
{{- end -}}
{{- if and (not $redis.tls.enabled) (not $redis.urlSecret.name) (or $redis.tls.secret $redis.tls.clientCertificate) -}}
{{- fail "redis.external.tls has a certificate but redis.external.tls.enabled is false" -}}
{{- end -}}
{{- if and $redis.tls.clientCertificate (not $redis.tls.secret) -}}
{{- fail "redis.external.tls.clientCertificate needs redis.external.tls.secret" -}}
{{- end -}}
{{- if and .Values.production .Values.redis.bundled.enabled -}}
{{- fail "production: true needs redis.external: the bundled Valkey is for trials" -}}
{{- end -}}

{{- $tls := .Values.tls -}}
{{- if and $tls.enabled (not $tls.existingSecret) (not $tls.certManager.enabled) -}}
{{- fail "tls.enabled needs tls.existingSecret or tls.certManager.enabled" -}}
{{- end -}}
{{- if and $tls.enabled $tls.existingSecret $tls.certManager.enabled -}}
{{- fail "tls has an existingSecret and certManager: leave one out" -}}
{{- end -}}
{{- if and $tls.enabled $tls.clientAuth (not $tls.certManager.enabled) (not $tls.existingClientSecret) -}}
{{- fail "tls.clientAuth with tls.existingSecret needs tls.existingClientSecret" -}}
{{- end -}}
{{- if and (not $tls.enabled) (or $tls.clientAuth $tls.certManager.enabled $tls.existingSecret) -}}
{{- fail "tls has sources but tls.enabled is false" -}}
{{- end -}}

{{- $auth := .Values.auth -}}
{{- if ne (empty $auth.existingSecret) (empty $auth.existingCredentials) -}}
{{- fail "auth.existingSecret and auth.existingCredentials belong together: the tokens, and their hashes" -}}
{{- end -}}
{{- if and (not $auth.generate) (not (and $auth.existingSecret $auth.existingKeys)) -}}
{{- fail "auth.generate is false: name auth.existingSecret, auth.existingCredentials and auth.existingKeys" -}}
{{- end -}}
{{- if and (not $auth.generate) .Values.redis.bundled.enabled (not .Values.redis.bundled.existingSecret) -}}
{{- fail "auth.generate is false: name redis.bundled.existingSecret" -}}
{{- end -}}

{{- $batch := .Values.batch -}}
{{- if $batch.enabled -}}
{{- if not $batch.engines -}}
{{- fail "batch.engines is required: base URLs of the engines that answer" -}}
{{- end -}}
{{- if gt (int $batch.replicas) 1 -}}
{{- if not $batch.database.urlSecret.name -}}
{{- fail (printf "batch.replicas is %d, and SQLite is for one: set batch.database.urlSecret to a PostgreSQL, or batch.replicas to 1" (int $batch.replicas)) -}}
{{- end -}}
{{- if not (or $batch.files.url $batch.persistence.existingClaim (eq $batch.persistence.accessMode "ReadWriteMany")) -}}
{{- fail (printf "batch.replicas is %d, and its files are where one node reaches them: set batch.files.url, or batch.persistence.accessMode to ReadWriteMany" (int $batch.replicas)) -}}
{{- end -}}
{{- end -}}
{{- if hasPrefix "file:" $batch.files.url -}}
{{- fail "batch.files.url is a folder of the container: leave it out for files on the volume" -}}
{{- end -}}
{{- if and (not $auth.generate) (not $batch.keys.existingSecret) -}}
{{- fail "auth.generate is false: name batch.keys.existingSecret" -}}
{{- end -}}
{{- end -}}

{{- with .Values.coordinator.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "coordinator.autoscaling: minReplicas is %d and maxReplicas %d" (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}

{{- /* Servers and engines share names of objects: the later of two would replace the other. */ -}}
{{- $objects := dict "coordinator" "coordinator" "placer" "placer" "batch" "batch" -}}
{{- range $name, $server := .Values.servers -}}
{{- $mode := $server.mode | default $.Values.ipc.mode -}}
{{- if and (ne $mode "hostNamespaces") (semverCompare "<1.34.0-0" $.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "servers.%s: mode %s needs ResourceClaims of Kubernetes 1.34; this is %s" $name $mode $.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $made := dict -}}
{{- if eq $mode "sidecar" }}{{ $_ := set $made $name (printf "servers.%s" $name) }}{{ end -}}
{{- range $engine, $spec := $server.engines -}}
{{- $_ := set $made (printf "%s-%s" $name $engine) (printf "servers.%s.engines.%s" $name $engine) -}}
{{- if and (eq $mode "sidecar") $spec.metricsPort (hasKey $server.engines (printf "%s-m" $engine)) -}}
{{- fail (printf "servers.%s.engines: the port for metrics of %s is called %s-m, as an engine is: rename one" $name $engine $engine) -}}
{{- end -}}
{{- end -}}
{{- range $object, $of := $made -}}
{{- if hasKey $objects $object -}}
{{- fail (printf "%s and %s would both be called %s: rename one" (get $objects $object) $of $object) -}}
{{- end -}}
{{- $_ := set $objects $object $of -}}
{{- end -}}
{{- $taken := dict -}}
{{- if and $server.gpus $server.visibleDevices -}}
{{- fail (printf "servers.%s has gpus and visibleDevices: leave one out" $name) -}}
{{- end -}}
{{- range $engine, $spec := $server.engines -}}
{{- if or $server.gpus $server.visibleDevices -}}
{{- if not $spec.gpuIndices -}}
{{- fail (printf "servers.%s.engines.%s.gpuIndices is required: the server says its GPUs" $name $engine) -}}
{{- end -}}
{{- if or $spec.gpus $spec.visibleDevices -}}
{{- fail (printf "servers.%s.engines.%s: gpuIndices say which GPUs; leave gpus and visibleDevices out" $name $engine) -}}
{{- end -}}
{{- range $index := $spec.gpuIndices -}}
{{- if ge (int $index) (int (include "aqua.serverGpus" $server)) -}}
{{- fail (printf "servers.%s.engines.%s.gpuIndices: %d is not among its %s GPUs" $name $engine (int $index) (include "aqua.serverGpus" $server)) -}}
{{- end -}}
{{- if hasKey $taken (toString $index) -}}
{{- fail (printf "servers.%s: engines %s and %s have GPU %d" $name (get $taken (toString $index)) $engine (int $index)) -}}
{{- end -}}
{{- $_ := set $taken (toString $index) $engine -}}
{{- end -}}
{{- else if $spec.gpuIndices -}}
{{- fail (printf "servers.%s.engines.%s.gpuIndices needs servers.%s.gpus or .visibleDevices" $name $engine $name) -}}
{{- end -}}
{{- if and (eq $mode "hostNamespaces") (not $spec.visibleDevices) (not $server.visibleDevices) -}}
{{- fail (printf "servers.%s.engines.%s.visibleDevices is required in mode hostNamespaces: nothing else keeps engines apart" $name $engine) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
