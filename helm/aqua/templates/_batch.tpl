{{/* What the two containers of the batch service share. */}}

{{/* Whether anything of it lies on a volume: the database, or files. */}}
{{- define "aqua.batchVolume" -}}
{{- if not (and .Values.batch.database.urlSecret.name .Values.batch.files.url) }}true{{ end -}}
{{- end }}

{{- define "aqua.batchUrl" -}}
{{ printf "http://%s-batch.%s.svc:%v" (include "aqua.fullname" .) .Release.Namespace .Values.batch.service.port }}
{{- end }}

{{- define "aqua.batchKeysSecret" -}}
{{ .Values.batch.keys.existingSecret | default (printf "%s-batch-keys" (include "aqua.fullname" .)) }}
{{- end }}

{{/* Secret and key of the operator's token; nothing where there is none. */}}
{{- define "aqua.batchOperator" -}}
{{- if and .Values.batch.enabled (or .Values.batch.operatorSecret.name .Values.auth.generate) -}}
name: {{ .Values.batch.operatorSecret.name | default (printf "%s-batch-operator" (include "aqua.fullname" .)) | quote }}
key: {{ .Values.batch.operatorSecret.key | quote }}
{{- end -}}
{{- end }}

{{- define "aqua.batchOperatorEnv" -}}
{{- with include "aqua.batchOperator" . }}
- name: AQUA_BATCH_OPERATOR_TOKEN
  valueFrom:
    secretKeyRef: {{- . | nindent 6 }}
{{- end }}
{{- end }}

{{- define "aqua.batchMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if include "aqua.batchVolume" . }}
- {name: data, mountPath: /var/lib/aqua}
{{- end }}
{{- end }}

{{- define "aqua.batchContainer" -}}
{{- $of := .Values.batch -}}
image: {{ include "aqua.image" (dict "root" . "of" $of) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{- include "aqua.containerSecurity" . | nindent 2 }}
resources: {{- toYaml $of.resources | nindent 2 }}
env:
  - {name: AQUA_BATCH_LISTEN_HOST, value: "0.0.0.0"}
  - {name: AQUA_BATCH_LISTEN_PORT, value: "7720"}
  - {name: AQUA_BATCH_DATA_DIR, value: /var/lib/aqua}
  - {name: AQUA_BATCH_ENGINES, value: {{ join "," $of.engines | quote }}}
  {{- with $of.engineKeySecret }}{{ if .name }}
  - name: AQUA_BATCH_ENGINE_API_KEY
    valueFrom:
      secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
  {{- end }}{{ end }}
  {{- include "aqua.batchOperatorEnv" . | nindent 2 }}
  {{- with $of.database.urlSecret }}{{ if .name }}
  - name: AQUA_BATCH_DATABASE_URL
    valueFrom:
      secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}
  {{- end }}{{ end }}
  {{- with $of.files.url }}
  - {name: AQUA_BATCH_FILES_URL, value: {{ . | quote }}}
  {{- end }}
  {{- include "aqua.settingsEnv" (dict "prefix" "AQUA_BATCH_" "settings" $of.settings) | nindent 2 }}
  {{- with $of.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $of.files.credentialsSecret }}
envFrom:
  - secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end }}
