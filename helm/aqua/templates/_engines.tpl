{{/* Containers of engines that share the GPUs of one server. */}}

{{/*
GPUs in the order of one engine: its own first, then its neighbours', since a process maps only memory
of GPUs that it sees. By UUID where the plan says them, else by place on the bus, engines by name. Where
the server says its GPUs, engines see all of them: none restarts when another comes or goes.
Call with (dict "server" s "engine" name).
*/}}
{{- define "aqua.visibleDevices" -}}
{{- $own := list }}{{ $others := list }}{{ $next := 0 -}}
{{- if or .server.gpus .server.visibleDevices -}}
{{- $indices := (index .server.engines .engine).gpuIndices -}}
{{- range $indices }}{{ $own = append $own (include "aqua.serverDevice" (dict "server" $.server "index" (int .))) }}{{ end -}}
{{- range $index := until (int (include "aqua.serverGpus" .server)) -}}
{{- $device := include "aqua.serverDevice" (dict "server" $.server "index" $index) -}}
{{- if not (has $device $own) }}{{ $others = append $others $device }}{{ end -}}
{{- end -}}
{{- else -}}
{{- range $name, $engine := .server.engines -}}
{{- $devices := $engine.visibleDevices | default list -}}
{{- if not $devices -}}
{{- range untilStep $next (int (add $next ($engine.gpus | default 1))) 1 }}{{ $devices = append $devices (toString .) }}{{ end -}}
{{- end -}}
{{- $next = int (add $next ($engine.gpus | default 1)) -}}
{{- if eq $name $.engine }}{{ $own = $devices }}{{ else }}{{ $others = concat $others $devices }}{{ end -}}
{{- end -}}
{{- end -}}
{{ join "," (concat $own $others) }}
{{- end }}

{{- define "aqua.serverGpus" -}}
{{ if .visibleDevices }}{{ len .visibleDevices }}{{ else }}{{ .gpus }}{{ end }}
{{- end }}

{{/* Call with (dict "server" s "index" i). */}}
{{- define "aqua.serverDevice" -}}
{{ if .server.visibleDevices }}{{ index .server.visibleDevices .index }}{{ else }}{{ .index }}{{ end }}
{{- end }}

{{/* Call with (dict "root" $ "server" s "name" n "count" c "uuids" u). */}}
{{- define "aqua.claimRequest" -}}
- name: {{ .name }}
  exactly:
    deviceClassName: {{ .server.deviceClassName | default .root.Values.ipc.deviceClassName | quote }}
    allocationMode: ExactCount
    count: {{ .count }}
    {{- with .uuids }}
    selectors:
      - cel:
          expression: {{ printf "device.attributes['gpu.nvidia.com'].uuid in ['%s']" (join "', '" .) | quote }}
    {{- end }}
{{- end }}

{{/* Call with (dict "root" $ "server" s). */}}
{{- define "aqua.claimSpec" -}}
{{- $of := dict "root" .root "server" .server -}}
devices:
  requests:
    {{- if or .server.gpus .server.visibleDevices }}
    {{- include "aqua.claimRequest" (merge (dict "name" "gpus" "count" (include "aqua.serverGpus" .server) "uuids" .server.visibleDevices) $of) | nindent 4 }}
    {{- else }}
    {{- range $engine, $spec := .server.engines }}
    {{- include "aqua.claimRequest" (merge (dict "name" $engine "count" ($spec.gpus | default 1) "uuids" $spec.visibleDevices) $of) | nindent 4 }}
    {{- end }}
    {{- end }}
  {{- with .server.constraints }}
  constraints: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Call with (dict "root" $ "name" server "server" s). */}}
{{- define "aqua.claimName" -}}
{{- $digest := include "aqua.claimSpec" . | sha256sum | trunc 5 -}}
{{ .server.resourceClaim | default (printf "%s-%s-%s" (include "aqua.fullname" .root) .name $digest) }}
{{- end }}

{{/* Call with (dict "root" $ "server" s "mode" m "name" engine "spec" e). */}}
{{- define "aqua.engineContainer" -}}
- name: {{ .name }}
  image: {{ .spec.image | quote }}
  {{- with .spec.command }}
  command: {{ toJson . }}
  {{- end }}
  {{- with .spec.args }}
  args: {{ toJson . }}
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    privileged: false
    capabilities:
      drop: [ALL]
  env:
    - name: AQUA_NODE
      valueFrom:
        fieldRef: {fieldPath: spec.nodeName}
    - {name: AQUA_SOCKET_DIR, value: /run/aqua}
    {{- if .root.Values.tracing.engines }}
    {{- include "aqua.tracingEnv" .root | nindent 4 }}
    {{- end }}
    - {name: CUDA_DEVICE_ORDER, value: PCI_BUS_ID}
    - {name: CUDA_VISIBLE_DEVICES, value: {{ include "aqua.visibleDevices" (dict "server" .server "engine" .name) | quote }}}
    {{- if eq .mode "hostNamespaces" }}
    # Past the device plugin: what CUDA sees is up to the line above.
    - {name: NVIDIA_VISIBLE_DEVICES, value: all}
    {{- end }}
    {{- include "aqua.callerEnv" (dict "root" .root "role" "member") | nindent 4 }}
    {{- with .spec.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if or .spec.port .spec.metricsPort }}
  ports:
    {{- with .spec.port }}
    - {name: {{ $.name | quote }}, containerPort: {{ . }}}
    {{- end }}
    {{- with .spec.metricsPort }}
    - {name: {{ printf "%s-m" $.name | quote }}, containerPort: {{ . }}}
    {{- end }}
  {{- end }}
  {{- with .spec.healthPath }}
  startupProbe:
    httpGet: {path: {{ . | quote }}, port: {{ $.name | quote }}}
    periodSeconds: 10
    # Twenty minutes, to load a model.
    failureThreshold: 120
  readinessProbe:
    httpGet: {path: {{ . | quote }}, port: {{ $.name | quote }}}
    timeoutSeconds: 5
  livenessProbe:
    httpGet: {path: {{ . | quote }}, port: {{ $.name | quote }}}
    periodSeconds: 20
    timeoutSeconds: 10
  {{- end }}
  resources:
    {{- with .spec.resources }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if ne .mode "hostNamespaces" }}
    # All GPUs of the server's claim, not those of one request alone.
    claims: [{name: gpus}]
    {{- end }}
  volumeMounts:
    - {name: sockets, mountPath: /run/aqua}
    - {name: shm, mountPath: /dev/shm}
    {{- include "aqua.callerMounts" .root | nindent 4 }}
    {{- with .spec.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* What pods of a server have around their containers; call with (dict "root" $ "name" server "server" s "mode" m "volumes" v). */}}
{{- define "aqua.enginePod" -}}
{{- include "aqua.pullSecrets" .root }}
automountServiceAccountToken: false
securityContext:
  {{- with .server.runAsUser }}
  runAsNonRoot: true
  runAsUser: {{ int64 . }}
  runAsGroup: {{ int64 . }}
  fsGroup: {{ int64 . }}
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- if eq .mode "hostNamespaces" }}
hostIPC: true
hostPID: true
runtimeClassName: {{ .root.Values.ipc.runtimeClassName | quote }}
affinity:
  # The engines of one server are on one node.
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
            aqua.dev/server: {{ .name | quote }}
{{- end }}
{{- with .server.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .server.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .server.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- if ne .mode "hostNamespaces" }}
resourceClaims:
  - {name: gpus, resourceClaimName: {{ include "aqua.claimName" . | quote }}}
{{- end }}
{{- if and .server.runAsUser (ne .mode "sidecar") }}
initContainers:
  # The kubelet makes the directory for root; others may not replace a socket in it.
  - name: sockets
    image: {{ include "aqua.image" (dict "root" .root "of" .root.Values.coordinator) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [install, --directory, --mode=0700, {{ printf "--owner=%d" (int64 .server.runAsUser) }}, {{ printf "--group=%d" (int64 .server.runAsUser) }}, /run/aqua]
    securityContext:
      runAsNonRoot: false
      runAsUser: 0
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
        add: [CHOWN, FOWNER, DAC_OVERRIDE]
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: sockets, mountPath: /run/aqua}
{{- end }}
volumes:
  {{- if eq .mode "sidecar" }}
  - name: sockets
    emptyDir: {medium: Memory, sizeLimit: 1Mi}
  {{- else }}
  - name: sockets
    hostPath:
      path: {{ printf "%s/%s.%s.%s" .root.Values.ipc.hostSocketDir .root.Release.Namespace (include "aqua.fullname" .root) .name }}
      type: DirectoryOrCreate
  {{- end }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.ipc.shmSize }}}
  {{- include "aqua.callerVolumes" .root | nindent 2 }}
  {{- with .volumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
