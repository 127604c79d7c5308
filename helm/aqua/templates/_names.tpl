{{/* Names, labels and images. Every label is quoted: a release may be called `y` or `1e3`. */}}

{{- define "aqua.fullname" -}}
{{- /* A release may be called `1.5`; a Service's name begins with a letter and has no dots. */ -}}
{{- $name := .Values.fullnameOverride | default .Release.Name | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "aqua-%s" $name }}{{ end -}}
{{- if not (or .Values.fullnameOverride (contains "aqua" $name)) }}{{ $name = printf "%s-aqua" $name }}{{ end -}}
{{- /* 30 of the 63 characters of a label's value: names of servers and Jobs follow. */ -}}
{{- $name | trunc 30 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select; call with (dict "root" $ "component" "coordinator"). */}}
{{- define "aqua.selector" -}}
app.kubernetes.io/name: "aqua"
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end }}

{{- define "aqua.labels" -}}
{{ include "aqua.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
app.kubernetes.io/part-of: "aqua"
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | quote }}
{{- range $key, $value := .root.Values.commonLabels }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* Of engines' pods: without versions, so that an engine does not load its model anew with each upgrade. */}}
{{- define "aqua.engineLabels" -}}
{{ include "aqua.selector" (dict "root" .root "component" "engine") }}
app.kubernetes.io/part-of: "aqua"
{{- range $key, $value := .root.Values.commonLabels }}
{{ $key }}: {{ $value | quote }}
{{- end }}
{{- end }}

{{/* Call with (dict "root" $ "of" .Values.coordinator): a digest wins over the tag. */}}
{{- define "aqua.image" -}}
{{- $image := .root.Values.image -}}
{{- $name := printf "%s/%s" (required "image.registry is required: where the images built from docker/ are" $image.registry) .of.repository -}}
{{- if .of.digest }}{{ printf "%s@%s" $name .of.digest | quote }}
{{- else }}{{ printf "%s:%s" $name ($image.tag | default .root.Chart.AppVersion) | quote }}{{ end -}}
{{- end }}

{{- define "aqua.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "aqua.serviceAccount" -}}
serviceAccountName: {{ .name | quote }}
automountServiceAccountToken: false
{{- end }}

{{- define "aqua.isOpenShift" -}}
{{- $mode := .Values.openshift.mode -}}
{{- if or (eq $mode "always") (and (eq $mode "auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) }}true{{ end -}}
{{- end }}

{{/* Pods without a device: Pod Security "restricted". OpenShift draws user and group itself. */}}
{{- define "aqua.podSecurity" -}}
runAsNonRoot: true
{{- if not (include "aqua.isOpenShift" .) }}
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "aqua.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
privileged: false
capabilities:
  drop: [ALL]
{{- end }}

{{- define "aqua.hasPrometheus" -}}
{{- $mode := .Values.monitoring.mode -}}
{{- if or (eq $mode "always") (and (eq $mode "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) }}true{{ end -}}
{{- end }}
