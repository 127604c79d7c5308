{{/* Who reaches whom, and with which secrets. */}}

{{- define "aqua.coordinatorUrl" -}}
{{- $scheme := ternary "https" "http" .Values.tls.enabled -}}
{{ printf "%s://%s-coordinator.%s.svc:%v" $scheme (include "aqua.fullname" .) .Release.Namespace .Values.coordinator.service.port }}
{{- end }}

{{- define "aqua.tokensSecret" -}}
{{ .Values.auth.existingSecret | default (printf "%s-tokens" (include "aqua.fullname" .)) }}
{{- end }}

{{- define "aqua.credentialsSecret" -}}
{{ .Values.auth.existingCredentials | default (printf "%s-credentials" (include "aqua.fullname" .)) }}
{{- end }}

{{- define "aqua.keysSecret" -}}
{{ .Values.auth.existingKeys | default (printf "%s-keys" (include "aqua.fullname" .)) }}
{{- end }}

{{- define "aqua.valkeySecret" -}}
{{ .Values.redis.bundled.existingSecret | default (printf "%s-valkey" (include "aqua.fullname" .)) }}
{{- end }}

{{- define "aqua.tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "aqua.fullname" .)) }}
{{- end }}

{{- define "aqua.clientTlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}{{ printf "%s-client-tls" (include "aqua.fullname" .) }}
{{- else }}{{ .Values.tls.existingClientSecret }}{{ end -}}
{{- end }}

{{/* Settings of a service as variables; call with (dict "prefix" "AQUA_" "settings" .Values.coordinator.settings). */}}
{{- define "aqua.settingsEnv" -}}
{{- range $name, $value := .settings }}
{{- /* Numbers are floats in Helm, and %v writes large ones as 1e+06. */}}
- name: {{ $.prefix }}{{ upper $name }}
  value: {{ ternary ($value | toJson) (toString $value) (kindIs "float64" $value) | quote }}
{{- end }}
{{- end }}

{{/* Where traces go; nothing without an endpoint. Call with the root. */}}
{{- define "aqua.tracingEnv" -}}
{{- with .Values.tracing.endpoint }}
- {name: AQUA_TRACING, value: "true"}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end }}

{{/* Environment of everything that calls the coordinator; call with (dict "root" $ "role" "member"). */}}
{{- define "aqua.callerEnv" -}}
- name: AQUA_COORDINATOR_URL
  value: {{ include "aqua.coordinatorUrl" .root | quote }}
- name: AQUA_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "aqua.credentialsSecret" .root | quote }}
      key: {{ .role | quote }}
{{- if .root.Values.tls.enabled }}
- name: AQUA_TLS_CA
  value: /etc/aqua/tls/ca.crt
{{- if .root.Values.tls.clientAuth }}
- name: AQUA_TLS_CLIENT_CERT
  value: /etc/aqua/client-tls/tls.crt
- name: AQUA_TLS_CLIENT_KEY
  value: /etc/aqua/client-tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- define "aqua.callerMounts" -}}
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /etc/aqua/tls
  readOnly: true
{{- if .Values.tls.clientAuth }}
- name: client-tls
  mountPath: /etc/aqua/client-tls
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{/* Of the coordinator's Secret a caller sees the authority alone. No subPath: those are never updated. */}}
{{- define "aqua.callerVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "aqua.tlsSecret" . | quote }}
    defaultMode: 0444
    items:
      - {key: ca.crt, path: ca.crt}
{{- if .Values.tls.clientAuth }}
- name: client-tls
  secret:
    secretName: {{ include "aqua.clientTlsSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{/* The URL of Redis from its parts; the kubelet puts the password in. */}}
{{- define "aqua.redisUrl" -}}
{{- if .Values.redis.bundled.enabled -}}
redis://:$(AQUA_REDIS_PASSWORD)@{{ include "aqua.fullname" . }}-valkey:6379/0
{{- else -}}
{{- $redis := .Values.redis.external -}}
{{- $scheme := ternary "rediss" "redis" $redis.tls.enabled -}}
{{- $password := ternary ":$(AQUA_REDIS_PASSWORD)" "" (not (empty $redis.passwordSecret.name)) -}}
{{- $credentials := "" -}}
{{- if or $redis.username $password }}{{ $credentials = printf "%s%s@" $redis.username $password }}{{ end -}}
{{- if $redis.sentinel.hosts -}}
{{ printf "%s+sentinel://%s%s/%s/%v" $scheme $credentials (join "," $redis.sentinel.hosts) $redis.sentinel.service $redis.database }}
{{- else -}}
{{ printf "%s://%s%s:%v/%v" $scheme $credentials $redis.host $redis.port $redis.database }}
{{- end -}}
{{- if and $redis.tls.enabled $redis.tls.secret -}}
?ssl_ca_certs=/etc/aqua/redis-tls/ca.crt
{{- if $redis.tls.clientCertificate -}}
&ssl_certfile=/etc/aqua/redis-tls/tls.crt&ssl_keyfile=/etc/aqua/redis-tls/tls.key
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "aqua.redisEnv" -}}
{{- $redis := .Values.redis -}}
{{- if and (not $redis.bundled.enabled) $redis.external.urlSecret.name }}
- name: AQUA_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $redis.external.urlSecret.name | quote }}
      key: {{ $redis.external.urlSecret.key | quote }}
{{- else }}
{{- if $redis.bundled.enabled }}
- name: AQUA_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "aqua.valkeySecret" . | quote }}
      key: password
{{- else if $redis.external.passwordSecret.name }}
- name: AQUA_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $redis.external.passwordSecret.name | quote }}
      key: {{ $redis.external.passwordSecret.key | quote }}
{{- end }}
- name: AQUA_REDIS_URL
  value: {{ include "aqua.redisUrl" . | quote }}
{{- end }}
{{- if and (not $redis.bundled.enabled) (not (kindIs "invalid" $redis.external.minReplicas)) }}
- name: AQUA_MIN_REPLICAS
  value: {{ $redis.external.minReplicas | quote }}
{{- end }}
{{- end }}
