{{/* What the Jobs of placer and profiler share. */}}

{{/* A Job cannot be changed: its name follows what it does. Call with (dict "root" $ "kind" "profile" "name" n "spec" s "of" .Values.profiler). */}}
{{- define "aqua.jobName" -}}
{{- $what := list .spec (include "aqua.image" (dict "root" .root "of" .of)) | toJson | sha256sum | trunc 5 -}}
{{ printf "%s-%s-%s-%s" (include "aqua.fullname" .root) .kind .name $what }}
{{- end }}

{{- define "aqua.jobContainer" -}}
image: {{ include "aqua.image" (dict "root" .root "of" .of) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext: {{- include "aqua.containerSecurity" . | nindent 2 }}
resources: {{- toYaml .of.resources | nindent 2 }}
{{- end }}

{{- define "aqua.jobVolumes" -}}
- {name: results, emptyDir: {sizeLimit: 1Gi}}
- {name: tmp, emptyDir: {sizeLimit: 256Mi}}
{{ include "aqua.callerVolumes" . }}
{{- end }}
