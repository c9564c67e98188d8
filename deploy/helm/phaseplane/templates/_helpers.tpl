{{- define "phaseplane.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "phaseplane.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "phaseplane.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "phaseplane.selector" . }}
{{- end }}

{{- define "phaseplane.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Of a group of nodes: a dict of root, kind (engine or pool) and group (its name). */ -}}
{{- define "phaseplane.node.selector" -}}
{{ include "phaseplane.selector" .root }}
app.kubernetes.io/component: node
phaseplane/group: {{ .group }}
{{- end }}

{{- /* What every pod has. Services are not told as variables: PHASEPLANE_PORT is a setting of ours. */ -}}
{{- define "phaseplane.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "phaseplane.container" -}}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "phaseplane.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if .hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end }}

{{- /* GiB, perhaps a fraction, as a quantity. */ -}}
{{- define "phaseplane.gib" -}}
{{ mulf . 1024 | ceil | int64 }}Mi
{{- end }}

{{- define "phaseplane.control.url" -}}
http://{{ include "phaseplane.name" . }}-control:8000
{{- end }}

{{- /* The agent's variables: a dict of root, one (the group's settings) and role. */ -}}
{{- define "phaseplane.node.env" -}}
- {name: KEYS, value: /keys/nodes/env}
- {name: ROLE, value: {{ .role }}}
- name: INSTANCE
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if .one.interfaces }}
- {name: INTERFACES, value: {{ join "," .one.interfaces | quote }}}
{{- else }}
- name: PHASEPLANE_DATA_ADVERTISE
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
- {name: READY, value: {{ printf "%s/readyz?instance=%%s" (include "phaseplane.control.url" .root) | quote }}}
- {name: STALE, value: "/dev/shm/phaseplane-kv-*"}
- {name: PHASEPLANE_MODEL, value: {{ .one.model | default .root.Values.model.name | quote }}}
- {name: PHASEPLANE_DTYPE, value: {{ .root.Values.model.dtype | quote }}}
- {name: PHASEPLANE_BLOCK_SIZE, value: {{ .root.Values.model.blockSize | quote }}}
- {name: PHASEPLANE_KV_GIB, value: {{ .one.kvGib | quote }}}
- {name: PHASEPLANE_KV_LINKS, value: {{ .one.kvLinks | quote }}}
{{- range $name, $value := .one.env }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{- define "phaseplane.node.command" -}}
[/opt/phaseplane/entrypoint.sh, python3, -m, nodes.agent, --control, {{ printf "tcp://%s-control:8001" (include "phaseplane.name" .) | quote }}]
{{- end }}

{{- define "phaseplane.node.ready" -}}
readinessProbe:
  exec: {command: [python3, -IS, /opt/phaseplane/healthy.py]}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 2
{{- end }}

{{- define "phaseplane.node.volumes" -}}
- name: keys
  secret: {secretName: {{ .root.Values.keys.nodes }}, defaultMode: 0440}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ include "phaseplane.gib" .shmGib }}}
{{- with .root.Values.model.volume }}
- {{ merge (dict "name" "models") . | toJson }}
{{- end }}
{{- end }}

{{- define "phaseplane.node.mounts" -}}
- {name: keys, mountPath: /keys/nodes, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
